"""Workers that leave after a signal, or because they finish before the others."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.elastic import trainer_worker
from tests.elastic.cluster import cluster, until

pytestmark = pytest.mark.process


@pytest.mark.soak
@pytest.mark.parametrize("schedule", [("--overlap",), ()], ids=["overlap", "blocking"])
def test_sigterm_leaves_after_the_pending_round(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    """The first worker is fast and starts a round that the others reach later."""
    settings = ("--max-steps=100", "--step-s=0.1", *schedule)
    with cluster(tmp_path, *settings, lighthouse_min=1, program=trainer_worker.main) as workers:
        workers.start(0, "--step-s=0.01")
        workers.start(1)
        workers.start(2)
        workers.wait_for_round(0, 3)
        workers.wait_for_members(1, 3)
        workers.kill(0, signal.SIGTERM)
        assert workers.exit_status(0) == 0
        left_at = workers.lines(0)[-1]["round"]
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in workers.output(0)
        workers.wait_for_round(1, left_at + 2)
        workers.start(0, f"--resume={saved}")
        workers.wait_for_success(0, 1, 2)
        workers.check_rounds()
        for index in (1, 2):
            assert "a member was lost" not in workers.output(index)
            assert {len(line["members"]) for line in workers.lines(index)} >= {2, 3}
        assert len(workers.lines(0)[-1]["members"]) == 3
        assert workers.lines(0)[-1]["round"] == workers.lines(1)[-1]["round"]
        rates = {line["round"]: line["lr"] for line in workers.lines(1)}
        shared = [line for line in workers.lines(0) if line["round"] in rates]
        assert len(shared) > 2  # on a busy machine the others join after its first rounds
        assert all(line["steps"] == 4 * line["round"] for line in workers.lines(0))
        assert all(line["lr"] == rates[line["round"]] for line in shared)


@pytest.mark.soak
def test_sigterm_leaves_after_the_pending_round_also_without_a_checkpoint(tmp_path: Path) -> None:
    settings = ("--max-steps=20", "--step-s=0.7", "--overlap", "--dev-run")
    with cluster(tmp_path, *settings, lighthouse_min=1, program=trainer_worker.main) as workers:
        workers.start(0, "--step-s=0.01")
        workers.start(1)
        workers.start(2)
        workers.wait_for_round(0, 2)
        workers.kill(0, signal.SIGTERM)
        workers.wait_for_success(0, 1, 2)
        workers.check_rounds()
        assert "This worker leaves when its pending round is complete" in workers.output(0)
        last = workers.lines(0)[-1]["round"]
        for index in (1, 2):
            assert "a member was lost" not in workers.output(index)
            members = {line["round"]: line["members"] for line in workers.lines(index)}
            assert [len(members[last + i]) for i in (1, 2)] == [3, 2]


@pytest.mark.soak
@pytest.mark.parametrize(
    "schedule", [pytest.param((), id="blocking"), pytest.param(("--overlap",), id="overlap")]
)
def test_a_finished_worker_is_not_waited_for(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    """The second worker runs half as many rounds as the first one."""
    with cluster(tmp_path, "--steps=34", "--step-s=0.02", *schedule, lighthouse_min=1) as workers:
        workers.start(0, "--sync-every=4")
        workers.start(1, "--sync-every=8")
        workers.wait_for_success(0, 1)
        assert workers.lines(0)[-1]["round"] == 9
        assert workers.lines(1)[-1]["round"] == 5
        checksums = {line["round"]: line["checksum"] for line in workers.lines(0)}
        assert workers.lines(1)[-1]["checksum"] == checksums[5 + bool(schedule)]
        alone = [line["round"] for line in workers.lines(0) if len(line["members"]) == 1]
        assert alone == [*range(6 + bool(schedule), 10)]
        assert "Fewer than" not in workers.output(0)


@pytest.mark.soak
def test_the_last_round_waits_for_no_missing_member(tmp_path: Path) -> None:
    with cluster(
        tmp_path, "--steps=60", "--sync-every=40", "--step-s=0.05", lighthouse_min=1
    ) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(0, 1)
        workers.kill(1)
        workers.wait_for_success(0)
        assert [len(line["members"]) for line in workers.lines(0)][-2:] == [2, 1]


@pytest.mark.soak
def test_ctrl_c_in_the_last_round_ends_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, "--max-steps=2", program=trainer_worker.main) as workers:
        workers.start(0, "--step-s=0")
        workers.start(1, "--step-s=8")
        until(lambda: "One of 2 members" in workers.output(0), "two members")
        time.sleep(1)
        interrupted_at = workers.kill(0, signal.SIGINT)
        assert workers.exit_status(0) == 1
        assert time.time() - interrupted_at < 8
        assert "Detected KeyboardInterrupt" in workers.output(0)
