"""Waiting for the others: a clock, a label, an error that says who is missing, and a sum of all.

Small classes, because they surround every exchange: generators would take longer to set up than a
small model takes to pack.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch import Tensor
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
    """Turn a backend's RuntimeError into one that names the missing or failed worker.

    Args:
        group: The workers.
        place: What is being waited for, e.g. ``"round 12"``.
    """

    def __init__(self, group: WorkerGroup, place: str) -> None:
        self._group = group
        self._place = place

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError):
            explained = self._group.explained(error, self._place, self._began)
            if explained is not error:
                raise explained from error


class Sum:
    """A flat tensor that is being added up over all workers, in place; a single worker's stays.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
        flat: The same size on all workers; must stay untouched until :meth:`wait` has returned.
        place: What it is for, e.g. ``"round 12"``.
    """

    def __init__(
        self, group: WorkerGroup, statistics: Statistics, flat: Tensor, place: str
    ) -> None:
        self._group = group
        self._statistics = statistics
        self._flat = flat
        self._place = place
        self._work: dist.Work | None = None
        if group.data is not None:
            with Explained(group, place):
                self._work = dist.all_reduce(flat, group=group.data, async_op=True)
            n = group.num_workers
            statistics.bytes_sent += 2 * (n - 1) * flat.nbytes // n

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def arrives_within(self, seconds: float) -> bool:
        """Wait a little; on a GPU, where the host need not wait, return False at once."""
        if self._work is None:
            return True
        if self._flat.device.type != "cpu":
            return False
        try:
            with Timed(self._statistics):
                self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        self._work = None
        return True

    def wait(self) -> Tensor:
        """Return the sum; raises RuntimeError as :class:`Explained`."""
        if self._work is not None:
            with Timed(self._statistics), Explained(self._group, self._place):
                self._work.wait()
            self._work = None
        return self._flat

    def release(self) -> None:
        """The memory belongs to the caller."""


def labelled(name: str) -> AbstractContextManager[object]:
    """A ``record_function`` while somebody uses ``torch.profiler``; nothing otherwise.

    Without a profiler a label would still cost more than packing a small tensor.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()
