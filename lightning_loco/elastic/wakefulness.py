"""Whether this process has slept: been stopped, or its machine suspended.

Who sleeps for long is left behind by the others. What they had sent until then may still be there
when it wakes up, and look like an exchange that all have made.
"""

from __future__ import annotations

import threading
import time

from lightning_loco.background import BackgroundThread

_TICK_S = 0.25
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while a machine sleeps


class Wakefulness(BackgroundThread):
    """Looks at the clock all the time.

    Args:
        longest_s: A longer time without a look is sleep, in seconds.
    """

    def __init__(self, longest_s: float) -> None:
        super().__init__("loco-wakefulness")
        self._longest_s = longest_s
        self._looked_at = _now()
        self._gap_s = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until :meth:`close`."""
        while not self._ended.wait(_TICK_S):
            self._look()

    def begin(self) -> None:
        """Forget all sleep before."""
        with self._lock:
            self._looked_at, self._gap_s = _now(), 0.0

    def check(self) -> None:
        """RuntimeError if this process has slept since :meth:`begin`."""
        self._look()
        if self._gap_s > self._longest_s:
            raise RuntimeError(f"this worker has slept for {self._gap_s:.3g} s.")

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def end_with_process(self) -> float:
        """Look no more."""
        self.close()
        return super().end_with_process()

    def _look(self) -> None:
        with self._lock:
            now = _now()
            self._gap_s = max(self._gap_s, now - self._looked_at)
            self._looked_at = now


def _now() -> float:
    return time.clock_gettime(_CLOCK)
