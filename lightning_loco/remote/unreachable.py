"""Errors of messages to and from another rank, which name it or whoever has failed."""

from __future__ import annotations

import math
import time
from types import TracebackType

from lightning_loco.comm.watchdog import Watchdog


class Unreachable(RuntimeError):
    """Another rank is gone or too late.

    Attributes:
        rank: Which.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Explained:
    """A context that turns a backend's error into one that names the other rank.

    Args:
        name: Who that is.
        rank: Which.
        what: What was exchanged.
        watchdog: Knows who has failed, which is then the error.
        timeout_s: Longest wait inside, in seconds: after it the reports of others have come.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        what: str,
        watchdog: Watchdog | None,
        timeout_s: float | None = None,
    ) -> None:
        self._name = name
        self._rank = rank
        self._what = what
        self._watchdog = watchdog
        self._timeout_s = math.inf if timeout_s is None else timeout_s

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        failure = None
        if self._watchdog is not None:
            is_late = time.monotonic() - self._began >= self._timeout_s
            failure = self._watchdog.failure if is_late else self._watchdog.wait_for_failure()
        raise Unreachable(failure or late(self._name, self._what), self._rank) from error


def late(name: str, what: str) -> str:
    """Say that something was not exchanged with a rank."""
    return (
        f"{name}: {what} could not be exchanged. It has ended, or is later than the timeout. Look "
        "into its output first."
    )
