"""The mean over all workers: an all-reduce, whose first parcel can carry the workers' rows along.

A separate exchange of the rows would cost as much time as a small model's parameters. Only when all
workers are at a meeting, which the notice board tells, do the rows travel by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import Explained, Sum, Timed
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import ROUND, PendingRows, Row, start_rows, write_row
from lightning_loco.engine.buckets import Parcel

PATIENCE_S = 0.02
"""How long a round may travel before those at a meeting are told of it."""


class MeanExchange:
    """All-reduce: everyone receives the sum of the messages, to be divided by the total weight."""

    is_weighted = True
    can_carry_rows = True

    def __init__(self, group: WorkerGroup, statistics: Statistics) -> None:
        self._group = group
        self._statistics = statistics

    def start(self, parcel: Parcel, round_index: int) -> Sum:
        """Sum the messages in place; a worker of weight 0 must send zeros."""
        return Sum(self._group, self._statistics, parcel.wire, f"round {round_index}")

    @property
    def hops(self) -> int:
        """How many messages follow upon each other: an all-reduce goes around a ring twice."""
        return 2 * (self._group.num_workers - 1)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Sum in the order of the workers, then divide."""
        mean = torch.stack(list(messages)).sum(0).div_(len(messages))
        return [mean.clone() for _ in messages]


class RidingRows:
    """Rows travel behind the first parcel of a round, in a ``table`` of shape ``(N, width)``.

    ``send`` sends that parcel, given the number of the round and whether its message is one of
    valid progress. If a round ``stays`` under way while local steps go on, those at a meeting are
    told of it before it begins wherever the host does not wait: a local step that waits for its
    device may wait for the round, and with it for those who are at the meeting.
    """

    def __init__(
        self,
        group: WorkerGroup,
        table: Tensor,
        send: Callable[[int, bool], Any],
        stays: bool = False,
    ) -> None:
        self._group = group
        self._table = table
        self._send = send
        self._stays = stays
        self._is_known = False

    def meet(self, statistics: Statistics, row: Row, place: str) -> PendingRows | None:
        """Leave a notice with the row, and wait for those of all workers."""
        group, board, watchdog = self._group, self._group.board, self._group.watchdog
        if board is None or watchdog is None:
            return start_rows(group, statistics, row, place)
        board.exchange += 1
        group.come_to(place)
        with Timed(statistics, group.clock), Explained(group, place):
            found = board.meet(row.numbers, watchdog, place, group.timeout_s)
        self._is_known = found is None
        if found is None:
            return None
        table = torch.tensor(found, dtype=torch.float64)
        return PendingRows(lambda: table, place)

    def carry(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Send the row with the first parcel; invite those at a meeting when it is late."""
        group, is_known = self._group, self._is_known or row.place != ROUND
        if not self._is_known:
            group.come_to(place)
            if group.board is not None:
                group.board.exchange += 1
        self._is_known = False
        write_row(self._table, group.worker, row)
        began = time.monotonic()

        def invite() -> None:
            nonlocal is_known
            if group.board is not None and not is_known:
                is_known = True
                with Explained(group, place):
                    group.board.call_to_round(group.timeout_s)

        if self._stays and not group.host_waits:
            invite()
        handle: Sum = self._send(int(row.round_index), row.weight > 0)

        def receive() -> Tensor:
            if not handle.arrives_within(PATIENCE_S):
                invite()
            handle.wait()
            return self._table

        def has_arrived() -> bool:
            if not handle.has_arrived() and time.monotonic() > began + PATIENCE_S:
                invite()
            return handle.has_arrived()

        return PendingRows(receive, place, has_arrived)
