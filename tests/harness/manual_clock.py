"""Clocks for tests: one that only a test advances, one that skips sleeps, and a list of sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TypeVar

import pytest

from lightning_loco._util.background import run_in_thread
from lightning_loco._util.clock import Clock
from tests.harness.limits import HARNESS_S

T = TypeVar("T")

_POLL_S = 0.002
_YEARS_S = 2.0**30


class ManualClock(Clock):
    """Starts at 0 and advances only by :meth:`advance` and :meth:`pass_during`.

    Attributes:
        asked: Requested seconds of all sleeps and waits, in order.
    """

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._now = 0.0
        self._num_reads = 0
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, threading.Event]] = []

    def now(self) -> float:
        with self._changed:
            self._num_reads += 1
            return self._now

    def wall_time(self) -> float:
        return _YEARS_S + self.now()

    def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        with self._changed:
            self.asked.append(timeout_s)
            entry = (self._now + timeout_s, event)
            self._waiting.append(entry)
            try:
                self._hold(
                    lambda: event.is_set() or self._now >= entry[0], "the clock stands still"
                )
            finally:
                self._waiting.remove(entry)
            return event.is_set()

    def advance(self, seconds: float) -> None:
        """Advance the clock by ``seconds``."""
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait_until_waiting(self, count: int = 1) -> None:
        """Return once ``count`` threads sleep or wait."""
        with self._changed:
            self._hold(lambda: len(self._ends()) >= count, "too few waits")

    def wait_until_read(self, times: int = 5) -> None:
        """Return once the clock has been read ``times`` more times."""
        with self._changed:
            wanted = self._num_reads + times
            self._hold(lambda: self._num_reads >= wanted, "no thread reads the clock")

    def pass_during(self, call: Callable[[], T], others: int = 0) -> T:
        """Return the result of a call; while it and ``others`` wait, advance to the next end."""
        future = run_in_thread(call)
        while True:
            with self._changed:
                self._hold(lambda: future.done() or len(self._ends()) > others, "too few waits")
                if future.done():
                    return future.result()
                self._now = min(self._ends())
                self._changed.notify_all()

    def _ends(self) -> list[float]:
        """Return the end times of all pending waits."""
        return [end for end, event in self._waiting if end > self._now and not event.is_set()]

    def _hold(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HARNESS_S
        while not condition():
            assert time.monotonic() < deadline, what
            self._changed.wait(_POLL_S)  # setting an event does not notify this condition


class SkippingClock(ManualClock):
    """A sleep advances it, and returns at once."""

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self.asked.append(seconds)
        self.advance(seconds)
        time.sleep(0)  # let other threads run


def sleeps(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[float]:
    """Return a list that collects the seconds of each ``time.sleep`` of a module."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(module, "time", clock)
    return asked
