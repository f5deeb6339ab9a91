"""What a server does while it waits for another rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

_LONGEST_PAUSE_S = 0.5


class Meanwhile:
    """Looks around, and reassures those who wait for this server.

    Whoever waits for a server hears from it several times per ``timeout_s``, whomever it waits for
    itself. So one deadline counts, that of the rank that waits for the one that is late: all others
    are told to go on waiting, and learn from it who that is.

    Args:
        timeout_s: Longest silence of a rank, in seconds; None to reassure nobody.
        look_around: Called while nothing happens; may raise.

    Attributes:
        timeout_s: As given.
    """

    def __init__(
        self, timeout_s: float | None = None, look_around: Callable[[], object] = lambda: None
    ) -> None:
        self.timeout_s = timeout_s
        self._look_around = look_around
        self._reassure: list[Callable[[], object]] = []
        self._reassured_s = -math.inf

    def reassure(self, tell: Callable[[], object]) -> None:
        """Have somebody told, from now on, that this rank is alive and waits."""
        self._reassure.append(tell)

    def end(self) -> None:
        """Reassure nobody any more, and let go of all."""
        self._reassure.clear()

    def pauses(
        self, timeout_s: float | None, last_sign: Callable[[], float] = lambda: 0.0
    ) -> Iterator[float]:
        """Seconds to wait, again and again until the time is over; reassures before each.

        What this rank itself is held up does not count.

        Args:
            timeout_s: How long in all, in seconds; None to wait on.
            last_sign: When another rank has last asked for patience: the time begins anew.
        """
        left_s = limit_s = math.inf if timeout_s is None else timeout_s
        longest_s = _LONGEST_PAUSE_S if self.timeout_s is None else self.timeout_s / 8
        sign = last_sign()
        while left_s > 0:
            self._look_and_reassure()
            if sign != (sign := last_sign()):
                left_s = limit_s
            pause_s = min(_LONGEST_PAUSE_S, longest_s, left_s)
            yield pause_s
            left_s -= pause_s

    def _look_and_reassure(self) -> None:
        self._look_around()
        now = time.monotonic()
        if self.timeout_s is not None and now >= self._reassured_s + self.timeout_s / 4:
            self._reassured_s = now
            for tell in self._reassure:
                tell()
