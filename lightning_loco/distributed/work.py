"""Waiting for collectives: with a timeout, timed, and with errors that name the missing worker.

Data that a collective receives may be read only after its :class:`PendingWork` has completed. The
context managers are small classes because every exchange enters them: generators would take longer
to set up than a small model takes to pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup

_SHORTEST_POLL_INTERVAL_S = 2e-5
_LONGEST_POLL_INTERVAL_S = 1e-3


class WaitTimer:
    """A context that counts the time spent inside as waiting."""

    def __init__(self, statistics: Statistics, clock: Clock = REAL_CLOCK) -> None:
        self._statistics = statistics
        self._now = clock.now

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self._statistics.count_wait(self._started, self._now())


class PendingWork:
    """Several works of a backend, which have just been started and complete together.

    ``Work.wait`` of gloo blocks the host until the data have arrived, at most for the timeout of
    the process group. With NCCL only the device waits: the host would then block in its
    next read, without a timeout. The host therefore polls until the works are completed, a worker
    has reported an error, or ``timeout_s`` of the group has passed since they were started. A
    worker that is killed reports nothing: gloo notices its closed connections, NCCL does not.
    """

    def __init__(self, group: WorkerGroup, label: str, works: Iterable[dist.Work]) -> None:
        self._group = group
        self._label = label
        self._works = list(works)
        self._clock = group.clock
        self._started = self._clock.now()

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return or raise at once."""
        return self._are_completed() or (not self._group.wait_blocks_host and self._has_failed())

    def completes_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether all works have completed without an error."""
        blocks = self._group.wait_blocks_host
        if not blocks and not self._poll_until(self._clock.now() + seconds):
            return False
        try:
            for work in self._works:
                work.wait(timedelta(seconds=seconds)) if blocks else work.wait()
        except RuntimeError:
            return False  # wait raises it again, and says who is at fault
        self._works = []
        return True

    def wait(self) -> None:
        """Wait until all works have completed.

        RuntimeError, which names it, if a worker is missing or has failed.
        """
        group = self._group
        if group.wait_blocks_host:
            with ExplainErrors(group, self._label):
                for work in self._works:
                    work.wait()
        else:
            with ExplainErrors(group, self._label, self._started):
                if not self._poll_until(math.inf):
                    raise RuntimeError(f"No message in {self._label} after {group.timeout_s:g} s.")
                for work in self._works:
                    work.wait()  # makes the device's stream wait for the received data
        self._works = []

    def _poll_until(self, deadline: float) -> bool:
        """Poll until all works have completed (True), or the deadline or a failure (False)."""
        interval_s = _SHORTEST_POLL_INTERVAL_S
        while not self._are_completed():
            if self._clock.now() > deadline or self._has_failed():
                return False
            self._clock.sleep(interval_s)
            interval_s = min(2 * interval_s, _LONGEST_POLL_INTERVAL_S)
        return True

    def _are_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _has_failed(self) -> bool:
        watchdog, timeout_s = self._group.watchdog, self._group.timeout_s
        has_failure = watchdog is not None and watchdog.failure is not None
        return has_failure or self._clock.now() > self._started + timeout_s


class AllReduceSum:
    """A pending all-reduce that sums a flat tensor over all workers, in place.

    The tensor has the same size on all workers, and must not be changed until :meth:`wait` returns.
    With a single worker it is left unchanged. Nothing is ``lost``, since it is not compressed.
    """

    lost = None

    def __init__(
        self, group: WorkerGroup, statistics: Statistics, flat: Tensor, label: str
    ) -> None:
        self._timer = WaitTimer(statistics, group.clock)
        self._flat = flat
        self._work: PendingWork | None = None
        if group.data is not None:
            with ExplainErrors(group, label):
                work = dist.all_reduce(flat, group=group.data, async_op=True)
            self._work = PendingWork(group, label, [work])
            n = group.num_workers
            statistics.bytes_sent += 2 * (n - 1) * flat.nbytes // n

    def has_arrived(self) -> bool:
        """Return whether :meth:`wait` would return or raise at once."""
        return self._work is None or self._work.is_completed()

    def arrives_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the sum has arrived."""
        if self._work is not None:
            with self._timer:
                if not self._work.completes_within(seconds):
                    return False
            self._work = None  # so that wait has nothing left to wait for
        return True

    def wait(self) -> Tensor:
        """Wait for the sum and return it; raises the errors of :meth:`PendingWork.wait`."""
        if self._work is not None:
            with self._timer:
                self._work.wait()
            self._work = None
        return self._flat

    def release(self) -> None:
        """Do nothing: the memory belongs to the caller."""
