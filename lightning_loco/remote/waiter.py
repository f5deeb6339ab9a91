"""Waiting for one rank without risk for the others."""

from __future__ import annotations

import queue
from collections.abc import Callable

from lightning_loco.background import BackgroundThread
from lightning_loco.remote.meanwhile import Meanwhile

PARTING_S = 0.5
"""Longest wait for a thread that is to end: one that waits for a rank that is lost does not."""


Outcome = queue.SimpleQueue[Exception | None]
"""Gets what a wait has ended with: an error, or None."""


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
