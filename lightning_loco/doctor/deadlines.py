"""Calls that the system may keep waiting, above all questions to a name server, with a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may not come back in time.

    It runs in a thread that ends with the process, since nothing can end it before.

    Raises:
        TimeoutError: If it does not come back within ``limit_s`` seconds.
    """
    try:
        return _begin(call).result(max(limit_s, 0))
    except FutureTimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


async def awaited(limit_s: float, call: Callable[[], T]) -> T:
    """The same as :func:`within`, while other tasks go on."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(_begin(call)), max(limit_s, 0))
    except asyncio.TimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


def _begin(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="doctor-call", daemon=True).start()
    return future
