"""Work that is done beside other work, and that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Do it in a thread of its own, which does not keep the process from ending."""
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

    threading.Thread(target=fulfil, name="loco-background", daemon=True).start()
    return future
