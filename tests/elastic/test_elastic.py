"""Real workers that come, die, sleep and come again, under a real lighthouse."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lightning_loco.elastic.lighthouse import HEARD_S
from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, Cluster, cluster, until

pytestmark = pytest.mark.process

SCHEDULES = [pytest.param((), id="blocking"), pytest.param(("--overlap",), id="overlap")]


def first_members(made: Cluster, index: int, count: int) -> dict[str, object]:
    """The first line of a worker with so many members."""
    return next(line for line in made.lines(index) if len(line["members"]) == count)


def weight_of(line: dict[str, object]) -> object:
    weights, members = line["weights"], line["members"]
    assert isinstance(weights, list)
    assert isinstance(members, list)
    return weights[members.index(line["own"])]


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_joins_one_is_killed_and_the_others_go_on(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    settings = ("--rounds=40", "--from-members=3", "--step-s=0.04")
    with cluster(tmp_path, *settings, *schedule) as made:
        made.begin(2)
        made.join(2, rounds=5)
        killed_at = made.kill(0)
        made.ends(1, 2)
        assert made.agree() == first_members(made, 1, 3)["round"] + 41
        came = first_members(made, 2, 3)
        assert weight_of(came) == 0
        assert came["round"] == made.lines(2)[1]["round"] or came == made.lines(2)[0]
        assert came["steps"] == first_members(made, 1, 3)["steps"]
        others = [len(line["members"]) for line in made.lines(1)]
        assert set(others) >= {2, 3}
        after = min(line["time"] for line in made.lines(1) if line["time"] > killed_at + 0.05)
        assert after - killed_at < HEARTBEAT_TIMEOUT_S + 6  # +1 on a quiet machine


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_newcomer_takes_the_outer_rate_of_the_round(
    tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    """Its count of rounds comes with the state; another rate would part it from the others."""
    settings = ("--rounds=20", "--from-members=3", "--step-s=0.04", "--algorithm=diloco_schedule")
    with cluster(tmp_path, *settings, *schedule) as made:
        made.begin(2)
        made.join(2, rounds=5)
        made.ends(0, 1, 2)
        assert made.agree() == first_members(made, 0, 3)["round"] + 21
        assert weight_of(first_members(made, 2, 3)) == 0


@pytest.mark.soak
def test_a_sleeper_joins_anew(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=80", "--step-s=0.04", "--timeout-s=4") as made:
        for index in range(3):
            made.start(index)
        made.reaches(0, 3)
        until(lambda: len(made.lines(2)) > 3, "rounds of worker 2")
        made.sleep_through_a_round(2, seen_by=0)
        made.ends(0, 1, 2)
        made.agree()
        back = [line for line in made.lines(2) if line["weights"] and weight_of(line) == 0]
        assert back
        assert weight_of(made.lines(2)[-1]) == 1


@pytest.mark.soak
def test_a_sleeper_that_finds_nobody_any_more_says_so(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=20", "--step-s=0.04", min_workers=1) as made:
        made.start(0)
        made.start(1)
        made.meets(1, 2)
        made.kill(1, signal.SIGSTOP)
        made.ends(0)
        made.kill(1, signal.SIGCONT)
        made.ends(1)
        assert "goes on without w0-" in made.errors(1)
        assert "This worker is alone now and goes on from its own state." in made.errors(1)
        assert made.lines(0)[-1]["checksum"] != made.lines(1)[-1]["checksum"]


@pytest.mark.soak
def test_below_the_minimum_they_wait_until_someone_comes(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=40", "--step-s=0.02") as made:
        made.start(0)
        made.start(1)
        made.reaches(0, 3)
        made.kill(1)
        time.sleep(2.5)
        waited_in = len(made.lines(0))
        time.sleep(1)
        assert len(made.lines(0)) == waited_in
        made.start(2)
        made.ends(0, 2)
        made.agree()


@pytest.mark.soak
def test_below_the_minimum_for_too_long_is_an_error(tmp_path: Path) -> None:
    with cluster(tmp_path, "--timeout-s=6", min_workers=2, least=1) as made:
        made.start(0)
        assert made.exit_status(0) == 1
        assert "Fewer than 2 workers were there" in made.errors(0)


@pytest.mark.soak
def test_the_lighthouse_is_restarted(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=40", "--step-s=0.04") as made:
        made.start(0)
        made.start(1)
        made.reaches(0, 3)
        made.lighthouse.stop()
        time.sleep(1.5)
        made.lighthouse.start()
        made.ends(0, 1)
        assert made.agree() == 41


@pytest.mark.soak
def test_nobody_is_left_out_whom_a_new_lighthouse_has_not_heard_yet(tmp_path: Path) -> None:
    """The second worker is silent for longer than others wait before they ask a new lighthouse."""
    with cluster(tmp_path, "--rounds=40", "--step-s=0.04", min_workers=1) as made:
        made.start(0)
        made.start(1)
        made.meets(0, 2)
        made.lighthouse.stop()
        made.kill(1, signal.SIGSTOP)
        made.lighthouse.start()
        until(lambda: connections_with(made.lighthouse.port) >= 2, "connection")
        time.sleep(4 * HEARD_S)
        made.kill(1, signal.SIGCONT)
        made.ends(0, 1)
        made.agree()
        together = [line["round"] for line in made.lines(0) if len(line["members"]) == 2]
        assert together == list(range(together[0], 41))


def connections_with(port: int) -> int:
    """How many TCP connections lead to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    columns = [line.split() for line in lines]
    return sum(
        remote.endswith(f":{port:04X}") and state == "01" for _, _, remote, state, *_ in columns
    )


@pytest.mark.soak
def test_those_who_come_first_to_a_new_lighthouse_begin_no_other_run(tmp_path: Path) -> None:
    """The members are silent for a moment, as if it took them longer to find it again."""
    with cluster(tmp_path, "--rounds=60", "--step-s=0.05") as made:
        made.begin(2)
        made.lighthouse.stop()
        for index in (2, 3):
            made.start(index)
        time.sleep(8)  # until they look for it
        for index in (0, 1):
            made.kill(index, signal.SIGSTOP)
        made.lighthouse.start()
        until(lambda: connections_with(made.lighthouse.port) >= 2, "connection")
        time.sleep(0.4 * HEARD_S)
        for index in (0, 1):
            made.kill(index, signal.SIGCONT)
        made.ends(0, 1, 2, 3)
        assert made.agree() == 61
        assert len(made.lines(0)[-1]["members"]) == 4


@pytest.mark.soak
def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    with cluster(tmp_path, "--rounds=60", "--step-s=0.04") as made:
        made.start(0)
        made.start(1)
        made.reaches(0, 3)
        made.start(2, "--numel=1001")
        assert made.exit_status(2) == 1
        assert "This worker cannot join: parameters is [['weight', [1, 1001]" in made.errors(2)
        made.ends(0, 1)
        assert made.agree() == 61


def test_without_a_lighthouse_there_is_a_clear_error(tmp_path: Path) -> None:
    with cluster(tmp_path, "--timeout-s=2") as made:
        made.lighthouse.stop()
        made.start(0)
        assert made.exit_status(0) == 1
        assert f"The lighthouse at {made.lighthouse.address} does not answer" in made.errors(0)
