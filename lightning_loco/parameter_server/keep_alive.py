"""Waiting for other ranks, with keep-alives to the ranks that wait for this one."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_loco._util.background import BackgroundThread

T = TypeVar("T")

JOIN_TIMEOUT_S = 0.5
"""Longest wait for a thread to end; one that waits for a lost rank does not end in time."""

_MAX_PAUSE_S = 0.5

WaitResult = queue.SimpleQueue[Exception | None]
"""Receives how a wait has ended: with an error, or None."""


class KeepAlive:
    """Checks for failures and sends keep-alives while this rank waits.

    A rank that waits for a server receives a keep-alive several times per ``timeout_s``, also while
    the server itself waits for another rank. So only the rank that waits for the late one directly
    can time out; all others continue to wait, and its error names the late rank to them. Without
    ``timeout_s`` nothing is sent.

    Attributes:
        senders: Functions that send keep-alives to ranks that wait for this one.
        checks: Functions that are called during waits, and may raise.
    """

    def __init__(
        self, timeout_s: float | None = None, check: Callable[[], object] = lambda: None
    ) -> None:
        self.timeout_s = timeout_s
        self.senders: list[Callable[[], object]] = []
        self.checks = [check]
        self._last_sent_s = -math.inf

    def close(self) -> None:
        """Send no more keep-alives.

        The references are dropped: in a cycle they would keep the process group alive, whose
        threads then end only with a garbage collection.
        """
        self.senders.clear()
        self.checks.clear()

    def get(
        self,
        source: queue.Queue[T] | queue.SimpleQueue[T],
        timeout_s: float | None,
        last_keep_alive: Callable[[], float],
    ) -> T:
        """Wait for an item of a queue; TimeoutError after ``timeout_s``, None for no limit.

        Time in which this process is suspended does not count, and a keep-alive of another rank
        (the last came at ``last_keep_alive()``) restarts the timeout.
        """
        left_s = limit_s = math.inf if timeout_s is None else timeout_s
        longest_s = _MAX_PAUSE_S if self.timeout_s is None else self.timeout_s / 8
        seen = last_keep_alive()
        while left_s > 0:
            for check in self.checks:
                check()
            now = time.monotonic()
            if self.timeout_s is not None and now >= self._last_sent_s + self.timeout_s / 4:
                self._last_sent_s = now
                for send in self.senders:
                    send()
            if seen != (seen := last_keep_alive()):
                left_s = limit_s
            # Pauses are counted, and not the time: after a SIGSTOP of this process all others would
            # seem to be late.
            pause_s = min(_MAX_PAUSE_S, longest_s, left_s)
            try:
                return source.get(timeout=pause_s)
            except queue.Empty:
                left_s -= pause_s
        raise TimeoutError(f"Nothing was received for {timeout_s:g} s.")


class WaitThread(BackgroundThread):
    """A thread that waits for messages of one rank, so that a server can stop waiting for it.

    A gloo wait that times out closes the connections to all ranks, so waits in this thread have no
    timeout. After an error the rank counts as lost, and all later waits fail at once.
    """

    def __init__(self, name: str, keep_alive: KeepAlive) -> None:
        super().__init__(f"loco-wait-{name}")
        self._keep_alive = keep_alive
        # Not a TaskThread: its futures cost time in every bucket.
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], WaitResult] | None]
        self._tasks = queue.SimpleQueue()

    def submit(self, finish: Callable[[], object]) -> WaitResult:
        """Wait in the thread, by calling ``finish``, after all that was submitted before."""
        if self.ident is None:
            self.start()
        result: WaitResult = queue.SimpleQueue()
        self._tasks.put((finish, result))
        return result

    def wait(
        self, result: WaitResult, timeout_s: float | None, last_keep_alive: Callable[[], float]
    ) -> None:
        """Block until the thread's wait has ended; raise its error.

        Timeout as in :meth:`KeepAlive.get`; after a TimeoutError the thread continues to wait.
        """
        error = self._keep_alive.get(result, timeout_s, last_keep_alive)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after all that was submitted.

        The thread is joined, except if it waits for a lost rank: a thread that releases gloo work
        while Python shuts down would abort the process.
        """
        self._tasks.put(None)
        if self.ident is not None:
            self.join(JOIN_TIMEOUT_S)

    def end_with_process(self) -> float:
        """End the thread after all that was submitted, as the process ends."""
        self._tasks.put(None)
        return super().end_with_process()

    def run(self) -> None:
        """Wait for one task after the other."""
        is_lost = False
        while (task := self._tasks.get()) is not None:
            finish, result = task
            error: Exception | None = ConnectionError("This rank is lost.") if is_lost else None
            try:
                if not is_lost:
                    finish()
            except Exception as found:
                error, is_lost = found, True
            del task, finish  # before the main thread continues, maybe to the end of the process
            result.put(error)
            del error, result
