"""Decisions without threads, sockets or files, and the function that carries one out.

So a test may do the actions of several decisions in any order, and let any of them fail.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

Do = TypeVar("Do")
T = TypeVar("T")

Decision: TypeAlias = Generator[tuple[Do, Any], Any, T]
"""Yields actions with their argument, is sent the outcome of each, or has its error thrown into it,
and returns what was decided."""


def carry_out(
    decision: Decision[Do, T],
    do: Callable[[Do, Any], Any],
    first: tuple[Do, Any] | None = None,
) -> T:
    """Do what a decision yields until it returns; return what it returns.

    ``first`` is the action of a decision that has begun, and waits for its outcome.
    """
    try:
        action = next(decision) if first is None else first
        while True:
            try:
                outcome = do(*action)
            except Exception as error:
                action = decision.throw(error)
            else:
                action = decision.send(outcome)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
