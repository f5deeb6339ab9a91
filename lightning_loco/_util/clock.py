"""The clock for waits. It is passed as an argument, so that tests can pass another one."""

from __future__ import annotations

import threading
import time


class Clock:
    """The clock of this machine.

    Attributes:
        now: Returns seconds that never decrease.
        wall_time: Returns seconds since 1970; equal in all processes on this machine.
        sleep: Sleeps for a number of seconds.
    """

    now = staticmethod(time.monotonic)
    wall_time = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until an event is set, at most ``timeout_s``; return whether it is set."""
        return event.wait(timeout_s)


REAL_CLOCK = Clock()
