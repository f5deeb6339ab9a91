"""Jobs under Lightning that join and leave: data, learning rates, weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import trainer_worker
from tests.elastic.cluster import Cluster, cluster, until

pytestmark = pytest.mark.process


def check_samples(workers: Cluster, *indices: int) -> None:
    """Check that no two members of a round used the same sample."""
    rounds: dict[int, list[int]] = {}
    for index in indices:
        for line in workers.lines(index):
            rounds.setdefault(line["round"], []).extend(line["samples"])
    for round_index, samples in rounds.items():
        assert max(Counter(samples).values()) == 1, (round_index, sorted(samples))


def by_round(workers: Cluster, index: int) -> dict[int, dict[str, Any]]:
    return {line["round"]: line for line in workers.lines(index)}


def end_of(folder: Path, index: int) -> dict[str, Any]:
    """Return the model of a job after fit, and its number of rounds."""
    found: dict[str, Any] = json.loads((folder / f"{index}.end").read_text())
    return found


@pytest.mark.parametrize(
    ("steps", "rounds"), [pytest.param(40, 20 + 1, marks=pytest.mark.soak), (41, 20 + 2)]
)
def test_jobs_end_with_a_round_of_each_fragment(tmp_path: Path, steps: int, rounds: int) -> None:
    """Except for fragments whose round started after the last step."""
    settings = (f"--max-steps={steps}", "--step-s=0", "--stream")
    with cluster(tmp_path, *settings, program=trainer_worker.main) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_success(0, 1)
        workers.check_rounds()
        check_samples(workers, 0, 1)
        ends = [end_of(tmp_path, index) for index in range(2)]
        assert ends[0] == ends[1]
        assert ends[0]["rounds"] == rounds


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param((), id="blocking", marks=pytest.mark.soak),
        pytest.param(("--overlap",), id="overlap", marks=pytest.mark.soak),
        pytest.param(("--stream",), id="fragments", marks=pytest.mark.soak),
    ],
)
def test_a_third_job_joins_and_the_first_is_killed(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    program = trainer_worker.main
    with cluster(tmp_path, "--max-steps=240", *schedule, program=program) as workers:
        workers.start_all(2)
        workers.join(2, rounds=4)
        workers.kill(0)
        workers.wait_for_success(1, 2)
        workers.check_rounds()
        check_samples(workers, 0, 1, 2)
        own, joined = by_round(workers, 1), by_round(workers, 2)
        for round_index, line in joined.items():
            assert line["lr"] == own[round_index]["lr"]
            assert line["logged_step"] == own[round_index]["logged_step"]
            assert line["betas"] == own[round_index]["betas"]
            assert line["steps"] == own[round_index]["steps"]
        assert {len(line["members"]) for line in own.values()} >= {2, 3}
        assert 240 - own[max(own)]["steps"] < 4
        for line in (*own.values(), *joined.values()):
            if line["members"]:
                assert line["logged"]["loco/members"] == len(line["members"])
                assert line["logged"]["loco/repaired"] == 0
        assert "on workers that come and go" in workers.output(2)
        assert "One of 3 members, from round" in workers.output(2)
        ends = [end_of(tmp_path, index) for index in (1, 2)]
        assert ends[0]["model"] == ends[1]["model"]


def test_a_worker_that_joins_in_the_last_round_makes_no_step(tmp_path: Path) -> None:
    """Others join at the same time, with other data and another number of steps."""
    with cluster(tmp_path, "--max-steps=4", "--step-s=3", program=trainer_worker.main) as workers:
        workers.start(0)
        workers.start(1)
        until(lambda: "One of 2 members" in workers.output(0), "two members")
        workers.start(2)
        workers.start(3, "--samples=3000")
        workers.start(4, "--max-steps=3")
        workers.wait_for_success(0, 1, 2, 4)
        assert workers.exit_status(3) == 1
        assert "num_samples is [3000] here and [4000] in the run (as w" in workers.output(3)
        assert "takes 4 local steps in all, and this worker 3" in workers.output(4)
        for index in (2, 4):
            assert "from round 1 on" in workers.output(index)
            assert end_of(tmp_path, index)["model"] == end_of(tmp_path, 0)["model"]


@pytest.mark.soak
def test_loaders_with_processes_share_the_data(tmp_path: Path) -> None:
    settings = ("--max-steps=60", "--num-loaders=1")
    with cluster(tmp_path, *settings, program=trainer_worker.main) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_success(0, 1)
        assert workers.check_rounds() == 15
        check_samples(workers, 0, 1)
