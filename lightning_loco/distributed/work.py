"""Waiting for the others: a clock, a label, an error that says who is missing, and a sum of all.

Nothing that was received may be read before :class:`PendingWork` says that it is here. Small
classes, because they surround every exchange: generators would take longer to set up than a small
model takes to pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup

_SHORTEST_PAUSE_S = 2e-5
_LONGEST_PAUSE_S = 1e-3


class WaitTimer:
    """Add the seconds spent inside to ``statistics.wait_s``."""

    def __init__(self, statistics: Statistics, clock: Clock = REAL_CLOCK) -> None:
        self._statistics = statistics
        self._now = clock.now

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self._statistics.wait_s += self._now() - self._started


class ExplainErrors:
    """Turn a backend's RuntimeError into one that names the missing or failed worker.

    Args:
        group: The workers.
        label: What is being waited for, e.g. ``"round 12"``.
        since: When the wait began, by the group's clock. Default: on entering.
    """

    def __init__(self, group: WorkerGroup, label: str, since: float | None = None) -> None:
        self._group = group
        self._label = label
        self._since = since

    def __enter__(self) -> None:
        if self._since is None:
            self._since = self._group.clock.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and self._since is not None:
            explained = self._group.explained(error, self._label, self._since)
            if explained is not error:
                raise explained from error


class PendingWork:
    """Works of the backend under way, and how the host waits for what they bring.

    The ``wait`` of gloo blocks the host until the data are here, for as long as its timeout. That
    of NCCL only makes the device wait: the host would then block in its next read, outside of every
    deadline. So there it looks again and again whether the works have ended, whether a worker has
    failed, and whether ``timeout_s`` has passed since they began.

    Args:
        group: The workers.
        label: What it is for, e.g. ``"round 12"``.
        works: What has just begun.
    """

    def __init__(self, group: WorkerGroup, label: str, works: Iterable[dist.Work]) -> None:
        self._group = group
        self._label = label
        self._works = list(works)
        self._clock = group.clock
        self._began = self._clock.now()

    def have_ended(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never waits."""
        return self._are_completed() or (not self._group.wait_blocks_host and self._is_hopeless())

    def end_within(self, seconds: float) -> bool:
        """Wait a little; whether they have ended well. For works that can be looked after."""
        if not self._group.wait_blocks_host:
            return self._look_until(self._clock.now() + seconds)
        try:
            for work in self._works:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        self._works = []
        return True

    def wait(self) -> None:
        """Wait for their end; raises RuntimeError as :class:`ExplainErrors`."""
        group = self._group
        if group.wait_blocks_host:
            with ExplainErrors(group, self._label):
                for work in self._works:
                    work.wait()
        else:
            with ExplainErrors(group, self._label, since=self._began):
                if not self._look_until(math.inf):
                    raise RuntimeError(f"No message in {self._label} after {group.timeout_s:g} s.")
                for work in self._works:
                    work.wait()  # lets the device see what has come
        self._works = []

    def _look_until(self, deadline: float) -> bool:
        """Look again and again; whether they have ended, and not only the time or all hope."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._are_completed():
            if self._clock.now() > deadline or self._is_hopeless():
                return False
            self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _are_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _is_hopeless(self) -> bool:
        watchdog, timeout_s = self._group.watchdog, self._group.timeout_s
        has_failed = watchdog is not None and watchdog.failure is not None
        return has_failed or self._clock.now() > self._began + timeout_s


class AllReduceSum:
    """A flat tensor that is being added up over all workers, in place; a single worker's stays.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
        flat: The same size on all workers; must stay untouched until :meth:`wait` has returned.
        label: What it is for, e.g. ``"round 12"``.
    """

    lost = None

    def __init__(
        self, group: WorkerGroup, statistics: Statistics, flat: Tensor, label: str
    ) -> None:
        self._timed = WaitTimer(statistics, group.clock)
        self._flat = flat
        self._works: PendingWork | None = None
        if group.data is not None:
            with ExplainErrors(group, label):
                work = dist.all_reduce(flat, group=group.data, async_op=True)
            self._works = PendingWork(group, label, [work])
            n = group.num_workers
            statistics.bytes_sent += 2 * (n - 1) * flat.nbytes // n

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self._works is None or self._works.have_ended()

    def arrives_within(self, seconds: float) -> bool:
        """Wait a little."""
        if self._works is None:
            return True
        with self._timed:
            return self._works.end_within(seconds)

    def wait(self) -> Tensor:
        """Return the sum; raises RuntimeError as :class:`ExplainErrors`."""
        if self._works is not None:
            with self._timed:
                self._works.wait()
            self._works = None
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
