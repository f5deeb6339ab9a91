"""Workers that join, die, are suspended and rejoin, with a torchft lighthouse."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lightning_loco.elastic.lighthouse import MIN_UPTIME_S
from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, Cluster, cluster, until

pytestmark = pytest.mark.process

SCHEDULES = [pytest.param((), id="blocking"), pytest.param(("--overlap",), id="overlap")]


def first_members(workers: Cluster, index: int, count: int) -> dict[str, object]:
    """Return the first line of a worker's log with this number of members."""
    return next(line for line in workers.lines(index) if len(line["members"]) == count)


def weight_of(line: dict[str, object]) -> object:
    weights, members = line["weights"], line["members"]
    assert isinstance(weights, list)
    assert isinstance(members, list)
    return weights[members.index(line["own"])]


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_joins_one_is_killed_and_the_others_continue(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    settings = ("--rounds=40", "--from-members=3", "--step-s=0.04")
    with cluster(tmp_path, *settings, *schedule) as workers:
        workers.start_all(2)
        workers.join(2, rounds=5)
        killed_at = workers.kill(0)
        workers.wait_for_success(1, 2)
        assert workers.check_rounds() == first_members(workers, 1, 3)["round"] + 41
        joined = first_members(workers, 2, 3)
        assert weight_of(joined) == 0
        assert joined["round"] == workers.lines(2)[1]["round"] or joined == workers.lines(2)[0]
        assert joined["steps"] == first_members(workers, 1, 3)["steps"]
        others = [len(line["members"]) for line in workers.lines(1)]
        assert set(others) >= {2, 3}
        after = min(line["time"] for line in workers.lines(1) if line["time"] > killed_at + 0.05)
        assert after - killed_at < HEARTBEAT_TIMEOUT_S + 6  # +1 on a quiet machine


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_joining_worker_has_the_outer_learning_rate_of_the_round(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    """It receives the round index with the state; with another rate it would drift."""
    settings = ("--rounds=20", "--from-members=3", "--step-s=0.04", "--algorithm=diloco_schedule")
    with cluster(tmp_path, *settings, *schedule) as workers:
        workers.start_all(2)
        workers.join(2, rounds=5)
        workers.wait_for_success(0, 1, 2)
        assert workers.check_rounds() == first_members(workers, 0, 3)["round"] + 21
        assert weight_of(first_members(workers, 2, 3)) == 0


@pytest.mark.soak
def test_a_suspended_worker_rejoins_as_a_new_one(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=80", "--step-s=0.04", "--timeout-s=4") as workers:
        for index in range(3):
            workers.start(index)
        workers.wait_for_round(0, 3)
        until(lambda: len(workers.lines(2)) > 3, "rounds of worker 2")
        workers.suspend_for_a_round(2, seen_by=0)
        workers.wait_for_success(0, 1, 2)
        workers.check_rounds()
        back = [line for line in workers.lines(2) if line["weights"] and weight_of(line) == 0]
        assert back
        assert weight_of(workers.lines(2)[-1]) == 1


@pytest.mark.soak
def test_a_suspended_worker_that_is_alone_afterwards_warns(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=20", "--step-s=0.04", min_workers=1) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_members(1, 2)
        workers.kill(1, signal.SIGSTOP)
        workers.wait_for_success(0)
        workers.kill(1, signal.SIGCONT)
        workers.wait_for_success(1)
        assert "continues without w0-" in workers.output(1)
        assert "This worker is alone now and continues from its own state." in workers.output(1)
        assert workers.lines(0)[-1]["checksum"] != workers.lines(1)[-1]["checksum"]


@pytest.mark.soak
def test_below_the_minimum_rounds_wait_until_a_worker_joins(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=40", "--step-s=0.02") as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(0, 3)
        workers.kill(1)
        time.sleep(2.5)
        waited_in = len(workers.lines(0))
        time.sleep(1)
        assert len(workers.lines(0)) == waited_in
        workers.start(2)
        workers.wait_for_success(0, 2)
        workers.check_rounds()


@pytest.mark.soak
def test_below_the_minimum_for_too_long_is_an_error(tmp_path: Path) -> None:
    with cluster(tmp_path, "--timeout-s=6", min_workers=2, lighthouse_min=1) as workers:
        workers.start(0)
        assert workers.exit_status(0) == 1
        assert "Fewer than 2 workers were there" in workers.output(0)


@pytest.mark.soak
def test_the_lighthouse_is_restarted(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=40", "--step-s=0.04") as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(0, 3)
        workers.lighthouse.stop()
        time.sleep(1.5)
        workers.lighthouse.start()
        workers.wait_for_success(0, 1)
        assert workers.check_rounds() == 41


@pytest.mark.soak
def test_no_live_member_is_left_out_after_a_restart_of_the_lighthouse(tmp_path: Path) -> None:
    """The second worker is silent for longer than others wait before they ask a new lighthouse."""
    with cluster(tmp_path, "--rounds=40", "--step-s=0.04", min_workers=1) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_members(0, 2)
        workers.lighthouse.stop()
        workers.kill(1, signal.SIGSTOP)
        workers.lighthouse.start()
        until(lambda: connections_with(workers.lighthouse.port) >= 2, "connection")
        time.sleep(4 * MIN_UPTIME_S)
        workers.kill(1, signal.SIGCONT)
        workers.wait_for_success(0, 1)
        workers.check_rounds()
        together = [line["round"] for line in workers.lines(0) if len(line["members"]) == 2]
        assert together == list(range(together[0], 41))


def connections_with(port: int) -> int:
    """Return the number of TCP connections to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    columns = [line.split() for line in lines]
    return sum(
        remote.endswith(f":{port:04X}") and state == "01" for _, _, remote, state, *_ in columns
    )


@pytest.mark.soak
def test_early_workers_do_not_begin_a_second_run_after_a_restart(tmp_path: Path) -> None:
    """The members pause for a moment, as if they needed longer to find the lighthouse again."""
    with cluster(tmp_path, "--rounds=60", "--step-s=0.05") as workers:
        workers.start_all(2)
        workers.lighthouse.stop()
        for index in (2, 3):
            workers.start(index)
        time.sleep(8)  # longer than their connection attempts
        for index in (0, 1):
            workers.kill(index, signal.SIGSTOP)
        workers.lighthouse.start()
        until(lambda: connections_with(workers.lighthouse.port) >= 2, "connection")
        time.sleep(0.4 * MIN_UPTIME_S)
        for index in (0, 1):
            workers.kill(index, signal.SIGCONT)
        workers.wait_for_success(0, 1, 2, 3)
        assert workers.check_rounds() == 61
        assert len(workers.lines(0)[-1]["members"]) == 4


@pytest.mark.soak
def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=60", "--step-s=0.04") as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_round(0, 3)
        workers.start(2, "--numel=1001")
        assert workers.exit_status(2) == 1
        assert "This worker cannot join: parameters is [['weight', [1, 1001]" in workers.output(2)
        workers.wait_for_success(0, 1)
        assert workers.check_rounds() == 61


def test_without_a_lighthouse_there_is_a_clear_error(tmp_path: Path) -> None:
    with cluster(tmp_path, "--timeout-s=2") as workers:
        workers.lighthouse.stop()
        workers.start(0)
        assert workers.exit_status(0) == 1
        assert f"The lighthouse at {workers.lighthouse.address} does not answer" in workers.output(
            0
        )
