"""Ways to fail, and the fault points of the package at which a process fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_loco._util.fault_points import POINTS, on_reach
from tests.harness.forked_jobs import freeze
from tests.harness.limits import LONG_S

DELAYED = {
    "within the exchange": ("exchange", 0.002),
    "within the confirmation": ("confirming", 0.0005),
}
"""Failures while gloo transfers data: a fault point, and a delay after it in seconds."""


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    """Raise an error as user code would."""
    raise LookupError("trouble")


def lose_connection() -> None:
    """Fail as gloo does, also after the others' confirmations were received."""
    raise RuntimeError("the connection is lost")


KINDS: dict[str, Callable[[], object]] = {
    "killed": die,
    "frozen": freeze,
    "raises": raise_error,
    "leaves": sys.exit,
    "hangs": lambda: time.sleep(LONG_S),
}


@contextmanager
def failing_at(
    point: str, is_time: Callable[[], bool], fail: Callable[[], object]
) -> Iterator[None]:
    """A context that fails once, the first time that a point is reached when it is time."""
    name, delay_s = DELAYED.get(point, (point, 0.0))
    assert name in POINTS
    once = iter([True])

    def act(reached: str) -> None:
        if reached == name and is_time() and next(once, False):
            if delay_s:
                threading.Timer(delay_s, fail).start()
            else:
                fail()

    with on_reach(act):
        yield
