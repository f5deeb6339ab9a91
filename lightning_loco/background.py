"""Threads beside the others, that keep no process from ending and do no harm when it does.

A thread that comes back from PyTorch, or from any other library in C++, while Python ends the
interpreter takes the process down with it by SIGABRT: ``terminate called without an active
exception``. So at the end of a process these threads are told to end, and waited for, for a moment.
One that is still there then sleeps for ever when it comes back, as Python 3.14 has it do.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

PARTING_S = 2.0
"""How long a process that ends waits for a thread unless it says otherwise."""


class BackgroundThread(threading.Thread):
    """A thread that a process waits for when it ends, but only for a moment.

    Args:
        name: Of the thread.
        work: What it does, for those that do not define ``run``.
        parting_s: How long a process that ends waits for it, in seconds.
    """

    def __init__(
        self, name: str, work: Callable[[], object] | None = None, parting_s: float = PARTING_S
    ) -> None:
        super().__init__(name=name, target=work, daemon=True)
        self._parting_s = parting_s

    def end_with_process(self) -> float:
        """Called once when the process ends, if the thread is alive: have it end soon.

        Returns:
            How long to wait for it at most, in seconds.
        """
        return self._parting_s


def begin(work: Callable[[], T], parting_s: float = PARTING_S) -> Future[T]:
    """Do it in a thread of its own, for which a process that ends waits only so long."""
    future: Future[T] = Future()

    def fulfil() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    BackgroundThread("loco-background", fulfil, parting_s).start()
    return future


@atexit.register
def _end_all() -> None:
    threads = [each for each in threading.enumerate() if isinstance(each, BackgroundThread)]
    ends = [time.monotonic() + thread.end_with_process() for thread in threads]
    for thread, end in zip(threads, ends, strict=True):
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _have_threads_sleep()


def _have_threads_sleep() -> None:
    """Have C++ suspend a thread where it would abort the process, where its library allows that.

    Longer joins would not do: of two processes that end together, each with a thread that waits in
    gloo for the other, a thread comes back while its process ends. Without this most of them hang,
    and some are aborted.
    """
    with suppress(OSError, AttributeError):
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.CDLL(None).pause)
