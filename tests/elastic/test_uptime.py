"""A quorum is requested once the lighthouse knows all workers that are alive."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from lightning_loco._util.clock import Clock
from lightning_loco.elastic.lighthouse import MIN_UPTIME_S, Uptime
from tests.elastic.cluster import Lighthouse

pytestmark = pytest.mark.recovery


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    started = Lighthouse(1)
    yield started
    started.stop()


class SleepingClock(Clock):
    """Keeps the seconds of all sleeps in ``asked``."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        time.sleep(seconds)


@pytest.fixture
def clock() -> SleepingClock:
    return SleepingClock()


@pytest.fixture
def uptime(lighthouse: Lighthouse, clock: SleepingClock) -> Iterator[Uptime]:
    measured = Uptime(lighthouse.address, clock=clock)
    yield measured
    measured.close()


def wait(uptime: Uptime, at_most_s: float = 60.0) -> float:
    started = time.monotonic()
    uptime.wait(started + at_most_s)
    return time.monotonic() - started


def test_only_a_restarted_lighthouse_is_waited_for(
    lighthouse: Lighthouse, uptime: Uptime, clock: SleepingClock
) -> None:
    assert wait(uptime) >= MIN_UPTIME_S
    clock.asked.clear()
    wait(uptime)
    assert clock.asked == []
    lighthouse.stop()
    lighthouse.start()
    assert wait(uptime) >= MIN_UPTIME_S


def test_a_restart_of_the_lighthouse_is_detected(lighthouse: Lighthouse, uptime: Uptime) -> None:
    wait(uptime)
    assert not uptime.has_restarted(60)
    lighthouse.stop()
    lighthouse.start()
    wait(uptime)
    assert uptime.has_restarted(60)
    assert not uptime.has_restarted(MIN_UPTIME_S)


def test_the_wait_ends_at_the_deadline(
    lighthouse: Lighthouse, uptime: Uptime, clock: SleepingClock
) -> None:
    wait(uptime, at_most_s=0.1)
    assert sum(clock.asked) <= 0.1


def test_a_lighthouse_that_does_not_answer_is_an_error(
    lighthouse: Lighthouse, uptime: Uptime
) -> None:
    lighthouse.stop()
    with pytest.raises(ConnectionError):
        wait(uptime)


def test_a_closed_uptime_does_not_wait(lighthouse: Lighthouse, uptime: Uptime) -> None:
    uptime.close()
    with pytest.raises(ConnectionError, match="has left the run"):
        wait(uptime)


def test_a_lighthouse_that_accepts_no_connection_is_an_error() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        uptime = Uptime(f"127.0.0.1:{full.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="timed out"):
            uptime.wait(time.monotonic())
