"""The clock that code waits by. It is an argument, so that tests can pass another one."""

from __future__ import annotations

import threading
import time


class Clock:
    """The clock of this machine.

    Attributes:
        now: Seconds that never go back.
        wall_time: Seconds since 1970, which all processes on this machine agree on.
        sleep: Return after so many seconds.
    """

    now = staticmethod(time.monotonic)
    wall_time = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Return once an event is set, or after a while; whether it is set."""
        return event.wait(timeout_s)


REAL_CLOCK = Clock()
