"""The mean over all workers: an all-reduce, whose first bucket can carry the statuses.

A separate all-gather of the statuses would take as long as the parameters of a small model. Only
when all workers are at a sync point, which the store barrier finds out, are statuses sent without a
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import AllReduceSum, WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    PendingStatuses,
    WorkerStatus,
    statuses_in,
    write_status,
)
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.exchange import SeparateStatuses

PATIENCE_S = 0.02
"""How long a round may take before workers at a sync point are called to it, in seconds."""


class AllReduce(SeparateStatuses):
    """Every worker receives the sum of the messages, to be divided by the total weight.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
        carries_status: Whether statuses travel behind the first bucket of a round.
        is_overlapped: Whether local steps continue while rounds are pending. If so, and if waiting
            does not block the host, workers at a sync point are called when a round starts: a local
            step may wait for the device, and thus for the round.
    """

    is_weighted = True

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        carries_status: bool = False,
        is_overlapped: bool = False,
    ) -> None:
        super().__init__(group, statistics)
        self.carries_status = carries_status
        self._calls_at_once = is_overlapped and not group.wait_blocks_host

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> AllReduceSum:
        """Sum the messages in place, each times its weight; one of weight 0 must be zeros."""
        if weight not in (0, 1):
            bucket.message.mul_(weight)
        return AllReduceSum(self._group, self._statistics, bucket.wire, f"round {round_index}")

    @property
    def num_hops(self) -> int:
        """How many messages follow each other: a ring all-reduce goes around twice."""
        return 2 * (self._group.num_workers - 1)

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Sum in the order of the workers."""
        rows = torch.stack(list(messages))
        if weights is not None and not set(weights) <= {0, 1}:
            rows.mul_(rows.new_tensor(weights)[:, None])
        total = rows.sum(0)
        return [total.clone() for _ in messages]

    # ---------------------------------------------------------------- statuses

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Write the status behind the message."""
        group = self._group
        if status.sync_point == IN_ROUND:
            group.announce_wait(label)
            # At a sync point wait_at_sync_point has counted this exchange already.
            if group.store_barrier is not None:
                group.store_barrier.exchange += 1
        write_status(self._table(bucket), group.worker, status)
        if self._calls_at_once and status.sync_point == IN_ROUND:
            call_to_round(self._group, label)

    def read_statuses(
        self, bucket: Bucket, handle: Any, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """The statuses behind the message; workers at a sync point are called if they are late."""
        is_called = self._calls_at_once or status.sync_point != IN_ROUND
        return StatusesBehindMessage(self._group, handle, self._table(bucket), label, is_called)

    def _table(self, bucket: Bucket) -> Tensor:
        return bucket.statuses.view(self._group.num_workers, -1)

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Wait at the store barrier for the statuses of all, or for a call to a round."""
        group, barrier, watchdog = self._group, self._group.store_barrier, self._group.watchdog
        if not self.carries_status or barrier is None or watchdog is None:
            return super().wait_at_sync_point(status, label)
        barrier.exchange += 1
        group.announce_wait(label)
        with WaitTimer(self._statistics, group.clock), ExplainErrors(group, label):
            found = barrier.wait(status.numbers, watchdog, label, group.timeout_s)
        if found is None:
            return None
        return statuses_in(torch.tensor(found, dtype=torch.float64, device="cpu"))


class StatusesBehindMessage:
    """Statuses that arrive with the first bucket of a round.

    Args:
        group: The workers.
        handle: Of the bucket.
        table: Memory of the statuses behind the message, ``(N, width)``.
        label: Name of the round in messages.
        is_called: Whether workers at a sync point know of the round already.
    """

    def __init__(
        self, group: WorkerGroup, handle: Any, table: Tensor, label: str, is_called: bool
    ) -> None:
        self.label = label
        self._group = group
        self._handle = handle
        self._table = table
        self._is_called = is_called
        self._started = group.clock.now()
        self._statuses: list[WorkerStatus] | None = None

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._statuses is not None

    def has_arrived(self) -> bool:
        """Whether the bucket has arrived; calls workers at a sync point if it is late."""
        is_late = self._group.clock.now() > self._started + PATIENCE_S
        if is_late and not self._handle.has_arrived():
            self._call()
        return bool(self._handle.has_arrived())

    def wait(self) -> list[WorkerStatus]:
        """Wait for the bucket and return the statuses, as :meth:`PendingStatuses.wait` does."""
        if self._statuses is None:
            # Usually no worker is at a sync point: a call through the store would only cost time.
            if not self._handle.arrives_within(PATIENCE_S):
                self._call()
            self._handle.wait()
            self._statuses = statuses_in(self._table)
        return self._statuses

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            call_to_round(self._group, self.label)


def call_to_round(group: WorkerGroup, label: str) -> None:
    """Call workers that wait at the store barrier to a round."""
    if group.store_barrier is not None:
        with ExplainErrors(group, label):
            group.store_barrier.call_to_round(group.timeout_s)
