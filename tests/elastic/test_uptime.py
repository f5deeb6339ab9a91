"""Whoever asks the lighthouse waits until it has heard of all who are alive."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from lightning_loco.elastic import lighthouse as module
from lightning_loco.elastic.lighthouse import HEARD_S, Uptime
from tests.distributed.workers import sleeps
from tests.elastic.cluster import Lighthouse

pytestmark = pytest.mark.recovery


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    started = Lighthouse(1)
    yield started
    started.stop()


@pytest.fixture
def uptime(lighthouse: Lighthouse) -> Iterator[Uptime]:
    begun = Uptime(lighthouse.address)
    yield begun
    begun.close()


def wait(uptime: Uptime, at_most_s: float = 60.0) -> float:
    began = time.monotonic()
    uptime.wait(began + at_most_s)
    return time.monotonic() - began


def test_only_a_new_lighthouse_is_waited_for(
    lighthouse: Lighthouse, uptime: Uptime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sleeps(monkeypatch, module)
    assert wait(uptime) >= HEARD_S
    asked.clear()
    wait(uptime)
    assert asked == []
    lighthouse.stop()
    lighthouse.start()
    assert wait(uptime) >= HEARD_S


def test_a_lighthouse_is_new_when_it_has_come_back(lighthouse: Lighthouse, uptime: Uptime) -> None:
    wait(uptime)
    assert not uptime.is_new(60)
    lighthouse.stop()
    lighthouse.start()
    wait(uptime)
    assert uptime.is_new(60)
    assert not uptime.is_new(HEARD_S)


def test_the_wait_ends_in_time(
    lighthouse: Lighthouse, uptime: Uptime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sleeps(monkeypatch, module)
    wait(uptime, at_most_s=0.1)
    assert sum(asked) <= 0.1


def test_a_lighthouse_that_does_not_answer_is_an_error(
    lighthouse: Lighthouse, uptime: Uptime
) -> None:
    lighthouse.stop()
    with pytest.raises(ConnectionError):
        wait(uptime)


def test_nobody_waits_after_the_end(lighthouse: Lighthouse, uptime: Uptime) -> None:
    uptime.close()
    with pytest.raises(ConnectionError, match="takes part no longer"):
        wait(uptime)


def test_a_lighthouse_that_lets_nobody_in_is_an_error() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        uptime = Uptime(f"127.0.0.1:{full.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="timed out"):
            uptime.wait(time.monotonic())
