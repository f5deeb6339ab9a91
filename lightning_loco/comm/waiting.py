"""What surrounds the phases of a round: a clock, a label, an error that says who is missing.

Small classes, because they surround every exchange: generators would take longer to set up than a
small model takes to pack.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from torch.autograd import profiler

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics


class Timed:
    """Add the seconds spent inside to ``statistics.wait_s``."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._statistics.wait_s += time.perf_counter() - self._started


class Explained:
    """Turn a backend's error into one that names the missing or failed worker.

    Args:
        group: The workers.
        place: What is being waited for, e.g. ``"round 12"``.

    Raises:
        RuntimeError: Instead of the backend's error, which stays its cause.
    """

    def __init__(self, group: WorkerGroup, place: str) -> None:
        self._group = group
        self._place = place

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and self._group.watchdog is not None:
            waited_s = time.perf_counter() - self._started
            raise RuntimeError(self._group.watchdog.explain(self._place, waited_s)) from error


def labelled(name: str) -> AbstractContextManager[object]:
    """A ``record_function`` while somebody uses ``torch.profiler``; nothing otherwise.

    Without a profiler a label would still cost more than packing a small tensor.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()
