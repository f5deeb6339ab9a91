"""Waiting for other ranks, while those who wait for this one hear that it is alive."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator

from lightning_loco.background import BackgroundThread

_LONGEST_PAUSE_S = 0.5

PARTING_S = 0.5
"""Longest wait for a thread that is to end: one that waits for a rank that is lost does not."""

Outcome = queue.SimpleQueue[Exception | None]
"""Gets what a wait has ended with: an error, or None."""


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


class Waiter(BackgroundThread):
    """Waits for a rank's messages in a thread, so that a server can give up on that rank.

    A wait of gloo that is too late closes the connections to all ranks; here it goes on. After an
    error the rank counts as lost: nothing else that was to come from it is waited for.

    Args:
        name: The rank's.
        meanwhile: What to do until a message comes.
    """

    def __init__(self, name: str, meanwhile: Meanwhile) -> None:
        super().__init__(f"loco-waiter-{name}")
        self._meanwhile = meanwhile
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Outcome] | None]
        self._tasks = queue.SimpleQueue()

    def begin(self, finish: Callable[[], object]) -> Outcome:
        """Wait for something in the thread, after all that it waits for already.

        Args:
            finish: Waits for it, however long it takes.
        """
        if self.ident is None:
            self.start()
        outcome: Outcome = queue.SimpleQueue()
        self._tasks.put((finish, outcome))
        return outcome

    def wait(
        self, outcome: Outcome, timeout_s: float | None, last_sign: Callable[[], float]
    ) -> None:
        """Wait until the thread has; what is given up may still come to its end.

        Args:
            outcome: As :meth:`begin` has returned it.
            timeout_s: Longest wait, in seconds; None to wait on.
            last_sign: When the rank has last asked for patience.

        Raises:
            TimeoutError: If it does not come in time.
            Exception: What the wait has ended with.
        """
        for pause_s in self._meanwhile.pauses(timeout_s, last_sign):
            try:
                error = outcome.get(timeout=pause_s)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return
        raise TimeoutError(f"Nothing came for {timeout_s:g} s.")

    def end(self) -> None:
        """End the thread once it waits for nothing.

        It is waited for, unless it waits for a rank that was given up: a thread that lets go of
        work while Python ends aborts the process.
        """
        self._tasks.put(None)
        if self.ident is not None:
            self.join(PARTING_S)

    def end_with_process(self) -> float:
        """End it once it waits for nothing."""
        self._tasks.put(None)
        return super().end_with_process()

    def run(self) -> None:
        """Wait for one thing after the other."""
        is_lost = False
        while (task := self._tasks.get()) is not None:
            finish, outcome = task
            error: Exception | None = ConnectionError("This rank is lost.") if is_lost else None
            try:
                if not is_lost:
                    finish()
            except Exception as found:
                error, is_lost = found, True
            del task, finish  # before the main thread goes on, maybe to the end of the process
            outcome.put(error)
            del error, outcome
