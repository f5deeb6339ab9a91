"""Calls that the system may keep waiting, above all questions to a name server, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from lightning_loco.background import begin

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may not come back in time.

    It runs in a thread that ends with the process, since nothing can end it before.

    Raises:
        TimeoutError: If it does not come back within ``limit_s`` seconds.
    """
    try:
        return begin(call).result(max(limit_s, 0))
    except FutureTimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


async def awaited(limit_s: float, call: Callable[[], T]) -> T:
    """The same as :func:`within`, while other tasks go on."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(begin(call)), max(limit_s, 0))
    except asyncio.TimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error
