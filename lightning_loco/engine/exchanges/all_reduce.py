"""The mean over all workers: an all-reduce, whose first bucket can carry the workers' statuses
along.

A separate exchange of the statuses would cost as much time as a small model's parameters. Only
when all workers are at a sync point, which the notice board tells, do the statuses travel by
themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import AllReduceSum, ExplainErrors, WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    PendingStatuses,
    WorkerStatus,
    start_statuses,
    write_status,
)
from lightning_loco.engine.buckets import Bucket

PATIENCE_S = 0.02
"""How long a round may travel before those at a sync point are told of it."""


class MeanExchange:
    """All-reduce: everyone receives the sum of the messages, to be divided by the total weight."""

    is_weighted = True
    can_carry_status = True

    def __init__(self, group: WorkerGroup, statistics: Statistics) -> None:
        self._group = group
        self._statistics = statistics

    def start(self, bucket: Bucket, round_index: int) -> AllReduceSum:
        """Sum the messages in place; a worker of weight 0 must send zeros."""
        return AllReduceSum(self._group, self._statistics, bucket.wire, f"round {round_index}")

    @property
    def hops(self) -> int:
        """How many messages follow upon each other: an all-reduce goes around a ring twice."""
        return 2 * (self._group.num_workers - 1)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Sum in the order of the workers, then divide."""
        mean = torch.stack(list(messages)).sum(0).div_(len(messages))
        return [mean.clone() for _ in messages]


class StatusesWithBucket:
    """Rows travel behind the first bucket of a round, in a ``table`` of shape ``(N, width)``.

    ``send`` sends that bucket, given the number of the round and whether its message is one of
    valid progress. If a round ``is_overlapped`` under way while local steps go on, those at a sync
    point are told of it before it begins wherever the host does not wait: a local step that waits
    for its device may wait for the round, and with it for those who are at the sync point.
    """

    def __init__(
        self,
        group: WorkerGroup,
        table: Tensor,
        send: Callable[[int, bool], Any],
        is_overlapped: bool = False,
    ) -> None:
        self._group = group
        self._table = table
        self._send = send
        self._is_overlapped = is_overlapped
        self._is_known = False

    def sync_point(
        self, statistics: Statistics, status: WorkerStatus, label: str
    ) -> PendingStatuses | None:
        """Leave a notice with the status, and wait for those of all workers."""
        group, store_barrier, watchdog = (
            self._group,
            self._group.store_barrier,
            self._group.watchdog,
        )
        if store_barrier is None or watchdog is None:
            return start_statuses(group, statistics, status, label)
        store_barrier.exchange += 1
        group.announce_wait(label)
        with WaitTimer(statistics, group.clock), ExplainErrors(group, label):
            found = store_barrier.meet(status.numbers, watchdog, label, group.timeout_s)
        self._is_known = found is None
        if found is None:
            return None
        table = torch.tensor(found, dtype=torch.float64)
        return PendingStatuses(lambda: table, label)

    def carry(self, statistics: Statistics, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send the status with the first bucket; invite those at a sync point when it is late."""
        group, is_known = self._group, self._is_known or status.sync_point != IN_ROUND
        if not self._is_known:
            group.announce_wait(label)
            if group.store_barrier is not None:
                group.store_barrier.exchange += 1
        self._is_known = False
        write_status(self._table, group.worker, status)
        began = time.monotonic()

        def invite() -> None:
            nonlocal is_known
            if group.store_barrier is not None and not is_known:
                is_known = True
                with ExplainErrors(group, label):
                    group.store_barrier.call_to_round(group.timeout_s)

        if self._is_overlapped and not group.wait_blocks_host:
            invite()
        handle: AllReduceSum = self._send(int(status.round_index), status.weight > 0)

        def receive() -> Tensor:
            if not handle.arrives_within(PATIENCE_S):
                invite()
            handle.wait()
            return self._table

        def has_arrived() -> bool:
            if not handle.has_arrived() and time.monotonic() > began + PATIENCE_S:
                invite()
            return handle.has_arrived()

        return PendingStatuses(receive, label, has_arrived)
