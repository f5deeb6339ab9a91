"""Background threads that neither keep a process from exiting nor crash it when it exits.

A thread that returns from PyTorch, or from any other C++ library, while the interpreter shuts down
aborts the process with SIGABRT: ``terminate called without an active exception``. So when a process
exits, these threads are asked to end, and joined with a timeout. A thread that is still running
then is suspended forever when it returns, as in Python 3.14.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_TIMEOUT_S = 2.0
"""Default of how long an exiting process waits for a thread, in seconds."""


class BackgroundThread(threading.Thread):
    """A daemon thread that an exiting process asks to end, and waits for with a timeout.

    It runs ``work``, unless a subclass defines ``run``. An exiting process calls ``ask_to_end``, if
    there is one, and waits ``exit_timeout_s``.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object] | None = None,
        exit_timeout_s: float = EXIT_TIMEOUT_S,
        ask_to_end: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name=name, target=work, daemon=True)
        self._exit_timeout_s, self._ask_to_end = exit_timeout_s, ask_to_end

    def end_with_process(self) -> float:
        """Ask the thread to end as the process exits; return how many seconds to wait for it."""
        if self._ask_to_end is not None:
            self._ask_to_end()
        return self._exit_timeout_s


class TaskThread(BackgroundThread):
    """Calls functions one after another; starts with the first one, if it was not started before.

    The thread keeps no reference to a function once its future is done: a thread that releases the
    last one to an object of a C++ library while the process exits would abort the process.
    """

    def __init__(self, name: str, exit_timeout_s: float = EXIT_TIMEOUT_S) -> None:
        super().__init__(name, exit_timeout_s=exit_timeout_s)
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call a function after those before it; return a future of its result or error."""
        if self.ident is None:
            self.start()
        future: Future[T] = Future()
        self._tasks.put((work, future))
        return future

    def run(self) -> None:
        """Call the functions, until ended."""
        while (task := self._tasks.get()) is not None:
            work, future = task
            del task
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    del work
                    future.set_exception(error)
                else:
                    del work
                    future.set_result(result)
                    del result
            del future

    def end(self) -> None:
        """End the thread after all functions that were submitted; does not wait for it."""
        self._tasks.put(None)

    def end_with_process(self) -> float:
        """End the thread after all that was submitted, as the process ends."""
        self.end()
        return super().end_with_process()


def run_in_thread(work: Callable[[], T], exit_timeout_s: float = EXIT_TIMEOUT_S) -> Future[T]:
    """Call a function in a new background thread; return a future of its result or error.

    An exiting process waits ``exit_timeout_s`` seconds for it.
    """
    thread = TaskThread("loco-background", exit_timeout_s)
    future = thread.submit(work)
    thread.end()
    return future


@atexit.register
def _end_all() -> None:
    threads = [each for each in threading.enumerate() if isinstance(each, BackgroundThread)]
    deadlines = [time.monotonic() + thread.end_with_process() for thread in threads]
    for thread, deadline in zip(threads, deadlines, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _suspend_instead_of_abort()


def _suspend_instead_of_abort() -> None:
    """Have C++ suspend a thread instead of aborting the process, if its library supports that.

    Longer timeouts would not help: if two processes exit together, each with a thread that waits in
    gloo for the other one, such a thread returns while its process exits. Without this function
    most of these processes hang, and some are aborted.
    """
    with suppress(OSError, AttributeError):
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.CDLL(None).pause)
