"""A worker dies at each point of a round: the others continue, and no round is lost."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
import torch

from lightning_loco.elastic.group import UNRESPONSIVE_S
from tests.elastic import resume_worker
from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, Cluster, cluster, until
from tests.harness.limits import HARNESS_S

pytestmark = pytest.mark.process

PROMPT_S = HEARTBEAT_TIMEOUT_S + 6  # +1 on a quiet machine
QUICK = "within the exchange"
OF_A_ROUND = (
    "before sending",
    "after sending",
    "before the group",
    "statuses",
    "exchange",
    "confirming",
    "within the confirmation",
    "after confirming",
    "after receiving",
)
"""Points that are not in tests/faults/table.py."""
AT_A_JOIN = ("making the group", "before the state is sent", "sending the state")
OF_A_CHECKPOINT = (
    "writing a checkpoint",
    "before a file is in its place",
    "before the last checkpoint is deleted",
)


@pytest.mark.parametrize(
    ("point", "longest_s"),
    [
        (QUICK, HARNESS_S),
        *(pytest.param(point, PROMPT_S, marks=pytest.mark.soak) for point in OF_A_ROUND),
    ],
)
def test_one_of_three_dies(tmp_path: Path, point: str, longest_s: float) -> None:
    size = "--numel=2000000" if point == QUICK else "--numel=1000"
    with cluster(tmp_path, "--rounds=24", "--step-s=0.02", size) as workers:
        workers.start(0, "--fail=killed", f"--fail-at={point}", "--fail-in=8")
        workers.start(1)
        workers.start(2)
        assert workers.exit_status(0) == -signal.SIGKILL
        workers.wait_for_success(1, 2)
        assert workers.check_rounds() == 25
        assert len(workers.lines(1)[-1]["members"]) == 2
        assert "continues without w0-" in workers.output(1)
        assert "alone" not in workers.output(1)
        assert longest_wait(workers) < longest_s


@pytest.mark.parametrize(
    ("overlap", "lost"), [((), 8), pytest.param(("--overlap",), 7, marks=pytest.mark.soak)]
)
def test_a_round_counts_although_the_only_worker_that_applied_it_is_dead(
    tmp_path: Path, overlap: tuple[str, ...], lost: int
) -> None:
    with cluster(tmp_path, "--rounds=24", "--step-s=0.02", *overlap) as workers:
        workers.start(0, "--fail=killed", "--fail-at=local step", "--fail-in=9")
        workers.start(1, "--lose-in=8")
        workers.start(2, "--lose-in=8")
        assert workers.exit_status(0) == -signal.SIGKILL
        workers.wait_for_success(1, 2)
        assert workers.check_rounds() == 25
        for index in (1, 2):
            assert f"Round {lost} counts" in workers.output(index)
            members = {line["round"]: len(line["members"]) for line in workers.lines(index)}
            assert [members[number] for number in (8, 9, 10)] == [3, 3, 2]


@pytest.mark.soak
@pytest.mark.parametrize("point", AT_A_JOIN)
def test_the_donor_of_the_state_dies(tmp_path: Path, point: str) -> None:
    with cluster(tmp_path, "--rounds=60", "--step-s=0.02", "--numel=2000000") as workers:
        workers.start(0, "--fail=killed", f"--fail-at={point}", "--fail-in=3")
        workers.start(1)
        workers.wait_for_round(1, 4)
        workers.start(2)
        assert workers.exit_status(0) == -signal.SIGKILL
        workers.wait_for_success(1, 2)
        assert workers.check_rounds() == 61
        assert len(workers.lines(2)[-1]["members"]) == 2
        assert longest_wait(workers) < PROMPT_S


@pytest.mark.soak
def test_a_joining_worker_dies_while_it_receives_the_state(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=60", "--step-s=0.02", "--numel=2000000") as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(1, 4)
        workers.start(2, "--fail=killed", "--fail-at=receiving the state")
        assert workers.exit_status(2) == -signal.SIGKILL
        workers.wait_for_success(0, 1)
        assert workers.check_rounds() == 61


@pytest.mark.soak
@pytest.mark.parametrize("point", ["statuses", QUICK, "confirming", "before the group", *AT_A_JOIN])
def test_a_frozen_worker_is_left_behind_and_rejoins(tmp_path: Path, point: str) -> None:
    settings = ("--rounds=400", "--step-s=0.02", "--numel=200000", "--timeout-s=300")
    with cluster(tmp_path, *settings) as workers:
        at_a_join = point in AT_A_JOIN
        among = 2 if at_a_join else 3
        failing = "--fail=frozen", f"--fail-at={point}", "--fail-in=8", f"--fail-among={among}"
        workers.start(0, *failing)
        workers.start(1)
        workers.wait_for_round(1, 8 if at_a_join else 0)
        workers.start(2)
        until(lambda: workers.is_frozen(0), "frozen worker")
        until(lambda: goes_on_without(workers, "w0"), "round without the frozen one")
        if point != QUICK:  # which a quick exchange passes before the worker is frozen
            assert longest_wait(workers) > UNRESPONSIVE_S
        workers.kill(0, signal.SIGCONT)
        workers.wait_for_success(0, 1, 2)
        assert workers.check_rounds() == 401
        assert len(workers.lines(0)[-1]["members"]) == 3
        assert (
            longest_wait(workers) < UNRESPONSIVE_S + HEARTBEAT_TIMEOUT_S + 10
        )  # +4 on a quiet machine


@pytest.mark.soak
@pytest.mark.parametrize("point", OF_A_CHECKPOINT)
def test_a_job_that_dies_while_it_saves_resumes_from_its_last_checkpoint(
    tmp_path: Path, point: str
) -> None:
    with cluster(tmp_path, "--max-steps=240", program=resume_worker.main) as workers:
        workers.start(0, f"--fail-at={point}", "--fail-in=6")
        workers.start(1)
        workers.start(2)
        assert workers.exit_status(0) == -signal.SIGKILL
        saved = tmp_path / "0" / "often.ckpt"
        assert torch.load(saved, weights_only=False)["global_step"] in (21, 24, 27)
        workers.start(0, f"--resume={saved}")
        workers.wait_for_success(0, 1, 2)
        assert workers.check_rounds() == 60
        assert len(workers.lines(0)[-1]["members"]) == 3
        assert longest_wait(workers) < PROMPT_S


@pytest.mark.parametrize("overlap", [pytest.param((), marks=pytest.mark.soak), ("--overlap",)])
def test_a_member_without_valid_progress_has_no_weight(
    tmp_path: Path, overlap: tuple[str, ...]
) -> None:
    with cluster(tmp_path, "--rounds=12", "--step-s=0.02", *overlap) as workers:
        workers.start(0)
        workers.start(1, "--nan-in=5")
        workers.wait_for_success(0, 1)
        assert workers.check_rounds() == 13
        weights = [sorted(line["weights"]) for line in workers.lines(0)]
        assert weights.count([0, 1]) == 1
        assert workers.lines(0)[-1]["outer"] == pytest.approx(1.5, abs=1.5)
        assert [workers.lines(index)[-1]["lost"] for index in range(2)] == [0, 4]
        assert all(workers.lines(index)[-1]["joining"] > 0 for index in range(2))


@pytest.mark.soak
def test_workers_leave_one_by_one_down_to_one(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=60", "--step-s=0.02", min_workers=1) as workers:
        for index in range(3):
            workers.start(index)
        for index in (1, 2):
            until(lambda index=index: members_now(workers) == 4 - index, "all")
            workers.kill(index)
        workers.wait_for_success(0)
        workers.check_rounds()
        assert [len(line["members"]) for line in workers.lines(0)][-1] == 1


def longest_wait(workers: Cluster) -> float:
    """Return the longest time between two rounds of worker 1, in seconds."""
    times = [line["time"] for line in workers.lines(1)]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def goes_on_without(workers: Cluster, name: str) -> bool:
    """Return whether the last round of worker 1 had other members, but not this one."""
    members = workers.lines(1)[-1]["members"]
    return len(members) > 1 and not any(member.startswith(name) for member in members)


def members_now(workers: Cluster) -> int:
    lines = workers.lines(0)
    return len(lines[-1]["members"]) if lines else 0
