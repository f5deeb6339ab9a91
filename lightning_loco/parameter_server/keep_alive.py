"""Waiting for other ranks, with keep-alives to the ranks that wait for this one."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from lightning_loco._util.background import TaskThread

T = TypeVar("T")

JOIN_TIMEOUT_S = 0.5
"""Longest wait for a thread to end; one that waits for a lost rank does not end in time."""

_MAX_PAUSE_S = 0.5


class KeepAlive:
    """Checks for failures and sends keep-alives while this rank waits.

    A rank that waits for a server receives a keep-alive several times per ``timeout_s``, also while
    the server itself waits for another rank. So only the rank that waits for the late one directly
    can time out; all others continue to wait, and its error names the late rank to them. Without
    ``timeout_s`` nothing is sent. ``check`` is called during waits and may raise.

    Attributes:
        senders: Functions that send keep-alives to ranks that wait for this one.
    """

    def __init__(
        self, timeout_s: float | None = None, check: Callable[[], object] = lambda: None
    ) -> None:
        self.timeout_s = timeout_s
        self.senders: list[Callable[[], object]] = []
        self._checks = [check]
        self._last_sent_s = -math.inf

    @contextmanager
    def checking(self, check: Callable[[], object]) -> Iterator[None]:
        """Call ``check`` during waits within this context, too."""
        self._checks.append(check)
        try:
            yield
        finally:
            self._checks.remove(check)

    def close(self) -> None:
        """Send no more keep-alives, and drop the references to all senders."""
        self.senders.clear()

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
            for check in self._checks:
                check()
            now = time.monotonic()
            if self.timeout_s is not None and now >= self._last_sent_s + self.timeout_s / 4:
                self._last_sent_s = now
                for send in self.senders:
                    send()
            if seen != (seen := last_keep_alive()):
                left_s = limit_s
            pause_s = min(_MAX_PAUSE_S, longest_s, left_s)
            try:
                return source.get(timeout=pause_s)
            except queue.Empty:
                left_s -= pause_s
        raise TimeoutError(f"Nothing was received for {timeout_s:g} s.")


class WaitThread(TaskThread):
    """A thread that waits for messages of one rank, so that a server can stop waiting for it.

    A gloo wait that times out closes the connections to all ranks, so waits in this thread have no
    timeout. After an error the rank counts as lost, and all later waits fail at once.
    """

    def __init__(self, name: str, keep_alive: KeepAlive) -> None:
        super().__init__(f"loco-wait-{name}")
        self._keep_alive = keep_alive
        self._is_lost = False

    def start_wait(self, finish: Callable[[], object]) -> Future[None]:
        """Wait in the thread, by calling ``finish``, after all waits before it."""

        def run() -> None:
            if self._is_lost:
                raise ConnectionError("This rank is lost.")
            try:
                finish()
            except Exception:
                self._is_lost = True
                raise

        return self.submit(run)

    def wait(
        self, started: Future[None], timeout_s: float | None, last_keep_alive: Callable[[], float]
    ) -> None:
        """Block until a wait of the thread has ended; raise its error.

        Timeout as in :meth:`KeepAlive.get`; after a TimeoutError the thread continues to wait.
        """
        ended: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        started.add_done_callback(ended.put)
        self._keep_alive.get(ended, timeout_s, last_keep_alive).result()

    def close(self) -> None:
        """End the thread after all that was submitted.

        The thread is joined, except if it waits for a lost rank.
        """
        self.end()
        if self.ident is not None:
            self.join(JOIN_TIMEOUT_S)
