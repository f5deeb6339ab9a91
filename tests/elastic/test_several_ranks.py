"""Elastic workers of several ranks, which exchange with ranks at the same place."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import resume_worker, trainer_worker
from tests.elastic.cluster import Cluster, cluster, until
from tests.elastic.test_faults import OF_A_ROUND
from tests.elastic.test_fit import by_round, check_samples, end_of
from tests.elastic.test_resume import newest

pytestmark = pytest.mark.process

RANKS = 2
SCHEDULES = {
    "blocking": (),
    "overlap": ("--overlap",),
    "fragments": ("--fragments=2", "--delay=1", "--mix=0.5"),
    "int8": ("--compression=int8",),
}

OTHERS = [name for name in SCHEDULES if name != "fragments"]


def vectors_by_round(workers: Cluster, worker: int) -> dict[int, dict[str, list[float]]]:
    """Return the vectors of a whole worker's outer state, in the order of places."""
    found: dict[int, dict[str, list[float]]] = {}
    for place in range(workers.ranks):
        for line in workers.lines(worker * workers.ranks + place):
            whole = found.setdefault(line["round"], {})
            for name, values in line["vectors"].items():
                whole[name] = whole.get(name, []) + values
    return found


def run_two(folder: Path, ranks: int, *settings: str) -> list[dict[int, Any]]:
    folder.mkdir()
    settings = (*settings, "--rounds=6", "--numel=1001", "--dtype=float64", "--vectors")
    with cluster(folder, *settings, ranks=ranks) as workers:
        workers.run_to_completion(2)
        return [vectors_by_round(workers, worker) for worker in range(2)]


@pytest.mark.parametrize(
    "schedule",
    ["fragments", *(pytest.param(one, marks=pytest.mark.soak) for one in OTHERS)],
)
def test_two_workers_of_two_ranks_equal_two_of_one(tmp_path: Path, schedule: str) -> None:
    """In every round, up to the rounding of vectorized sums."""
    whole = run_two(tmp_path / "1", 1, *SCHEDULES[schedule])
    divided = run_two(tmp_path / "2", RANKS, *SCHEDULES[schedule])
    for expected, found in zip(whole, divided, strict=True):
        assert len(expected) > 4
        for round_index, vectors in expected.items():
            for name, values in vectors.items():  # each fragment is divided separately
                own = sorted(found[round_index][name])
                assert own == pytest.approx(sorted(values), abs=1e-11), (round_index, name)


def test_a_rank_that_is_killed_takes_its_worker_with_it(tmp_path: Path) -> None:
    """The others continue; a new worker joins, and its ranks receive the state for their places."""
    with cluster(tmp_path, "--rounds=400", min_workers=1, ranks=RANKS) as workers:
        workers.start_all(3)
        workers.kill(3)
        assert workers.exit_status(2) not in (0, None)
        assert "worker 0, place 1 (rank 1)" in workers.output(2)
        workers.wait_for_members(0, 2)
        workers.start(3)
        workers.wait_for_members(0, 3)
        workers.wait_for_members(7, 3)
        for index in (0, 1, 4, 5, 6, 7):
            workers.kill(index)
        workers.check_states()


@pytest.mark.parametrize(
    "point",
    [
        "confirming",
        *(
            pytest.param(point, marks=pytest.mark.soak)
            for point in OF_A_ROUND
            if point != "confirming"
        ),
    ],
)
def test_a_rank_dies_within_a_round(tmp_path: Path, point: str) -> None:
    """A round counts on all ranks of the other workers, or on none of them."""
    with cluster(tmp_path, "--rounds=24", "--step-s=0.02", ranks=RANKS) as workers:
        workers.start(0, "--fail=killed", f"--fail-at={point}", "--fail-in=8", "--fail-place=1")
        workers.start(1)
        workers.start(2)
        assert workers.exit_status(1) == -signal.SIGKILL
        assert workers.exit_status(0) not in (0, None)
        workers.wait_for_success(2, 3, 4, 5)
        assert workers.check_rounds() == 25
        for index in (2, 3):
            assert len(workers.lines(index)[-1]["members"]) == 2
        assert "continues without w0-" in workers.output(2)


@pytest.mark.soak
def test_a_frozen_rank_is_left_behind_with_its_worker(tmp_path: Path) -> None:
    """The others continue long before the collectives inside that worker time out."""
    settings = ("--rounds=400", "--step-s=0.02", "--timeout-s=60")
    with cluster(tmp_path, *settings, ranks=RANKS) as workers:
        workers.start_all(3)
        workers.kill(3, signal.SIGSTOP)
        workers.wait_for_members(0, 2)
        assert workers.processes[2].exitcode is None
        assert workers.exit_status(2) not in (0, None)
        assert "No sign of life from worker 0, place 1 (rank 1)" in workers.output(2)


def test_a_round_that_one_rank_has_not_confirmed_counts_for_its_worker_later(
    tmp_path: Path,
) -> None:
    """As for a worker of one rank, the round counts because all have received it."""
    with cluster(tmp_path, "--rounds=24", "--step-s=0.02", ranks=RANKS) as workers:
        workers.start(0, "--fail=killed", "--fail-at=local step", "--fail-in=9", "--fail-place=1")
        workers.start(1, "--lose-in=8", "--fail-place=1")
        workers.start(2, "--lose-in=8", "--fail-place=0")
        assert workers.exit_status(1) == -signal.SIGKILL
        workers.wait_for_success(2, 3, 4, 5)
        assert workers.check_rounds() == 25
        assert "Round 8 counts" in workers.output(2)


@pytest.mark.parametrize(
    "point",
    ["copying the state", pytest.param("sending the state", marks=pytest.mark.soak)],
)
def test_one_rank_cannot_give_its_part_of_the_state(tmp_path: Path, point: str) -> None:
    """The joining worker's ranks all receive the state later, and the donor continues."""
    failure = ("--lose-in=1", f"--fail-at={point}", "--fail-place=1")
    with cluster(tmp_path, "--rounds=40", "--step-s=0.02", ranks=RANKS) as workers:
        for worker in range(2):
            workers.start(worker, *failure)
        workers.wait_for_round(2, 3)
        workers.start(2)
        workers.wait_for_success(*range(6))
        workers.check_rounds()
        assert "the connection is lost" in workers.output(0) + workers.output(1)


def test_a_worker_with_a_flipped_bit_on_one_rank_receives_the_state_on_all(tmp_path: Path) -> None:
    settings = ("--rounds=12", "--check-every=3")
    with cluster(tmp_path, *settings, min_workers=3, ranks=RANKS) as workers:
        for worker in range(3):
            workers.start(worker, *(("--flip-at=4", "--fail-place=1") if worker == 1 else ()))
        workers.wait_for_success(*range(6))
        ends = [workers.lines(index)[-1] for index in range(6)]
        assert [end["repaired"] for end in ends] == [1] * 6
        assert len({end["checksum"] for end in ends[::2]}) == 1
        assert len({end["checksum"] for end in ends[1::2]}) == 1


def test_a_member_with_another_number_of_ranks_cannot_join(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=12", "--step-s=0.05", ranks=RANKS) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(2, 2)
        workers.ranks = 1
        workers.start(4)
        assert workers.exit_status(4) == 1
        assert "ranks_per_worker is 1 here and 2 in the run" in workers.output(4)
        workers.ranks = RANKS
        workers.wait_for_success(0, 1, 2, 3)


@pytest.mark.parametrize("kind", [(), ("--shard=data",)], ids=["DDP", "FSDP2"])
def test_jobs_under_lightning(tmp_path: Path, kind: tuple[str, ...]) -> None:
    """A third job of two ranks joins, and a rank of the first is killed."""
    settings = ("--max-steps=240", *kind)
    program = trainer_worker.main
    with cluster(tmp_path, *settings, program=program, ranks=RANKS) as workers:
        workers.start_all(2)
        workers.start(2)
        until(lambda: len(workers.lines(5)) > 4, "rounds of the joining worker")
        workers.kill(1)
        workers.wait_for_success(2, 3, 4, 5)
        workers.check_rounds()
        check_samples(workers, *range(6))
        own, joined = by_round(workers, 2), by_round(workers, 5)
        for round_index, line in joined.items():
            assert line["lr"] == own[round_index]["lr"]
            assert line["logged_step"] == own[round_index]["logged_step"]
            assert line["steps"] == own[round_index]["steps"]
        assert {len(line["members"]) for line in own.values()} >= {2, 3}
        assert "One of 3 members, from round" in workers.output(4)
        ends = [end_of(tmp_path, index)["model"] for index in range(2, 6)]
        assert ends[0] == ends[2]
        assert ends[1] == ends[3]
        if not kind:
            assert ends[0] == ends[1]


def test_ranks_of_tensor_parallelism_read_the_same_samples(tmp_path: Path) -> None:
    """Also when a worker joins after only one of its ranks has read the next batch."""
    settings = ("--max-steps=80", "--shard=tensor", "--overlap", "--step-s=0", "--late-s=0.1")
    program = trainer_worker.main
    with cluster(tmp_path, *settings, program=program, ranks=RANKS) as workers:
        workers.start_all(2)
        workers.start(2)
        workers.wait_for_success(*range(6))
        workers.check_rounds()
        check_samples(workers, 0, 2, 4)
        for first in (0, 2, 4):
            own, sibling = by_round(workers, first), by_round(workers, first + 1)
            for round_index in own.keys() & sibling.keys():
                assert own[round_index]["samples"] == sibling[round_index]["samples"], round_index
        assert {len(line["members"]) for line in own.values()} == {3}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param((), marks=pytest.mark.soak),
        ("--overlap",),
        pytest.param(("--shard",), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_a_job_that_gets_sigterm_resumes_from_what_it_has_saved(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    """The signal reaches one rank, not the first; all ranks of the job stop and save."""
    program = resume_worker.main
    with cluster(tmp_path, "--max-steps=200", *schedule, program=program, ranks=RANKS) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(3, 4)
        workers.kill(3, signal.SIGTERM)
        assert workers.exit_status(2) == workers.exit_status(3) == 0, workers.output(2)
        saved = newest(tmp_path, 1)
        left_at = workers.lines(2)[-1]["round"]
        workers.start(1, f"--resume={saved}")
        workers.wait_for_success(0, 1, 2, 3)
        workers.check_states()
        check_samples(workers, *range(4))
        assert workers.lines(2)[-1]["round"] > left_at + 1
