"""Blocking rounds of an all-reduce whose first parcel carries the workers' rows along.

A separate exchange of the rows would cost as much time as a small model's parameters. Only when all
workers are at a meeting, which the notice board tells, do the rows travel by themselves.
"""

from __future__ import annotations

from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.control import (
    ROUND,
    PendingRows,
    Row,
    announce_place,
    start_rows,
    write_row,
)
from lightning_loco.comm.exchange import Exchange
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rounds import BlockingRounds, Parcel, UnderWay
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import explained, waiting


class MeanRounds(BlockingRounds):
    """Like :class:`BlockingRounds`, for the mean over all workers and without a second exchange.

    Args:
        layout: The trainable parameters; at least one.
        algorithm: What to compute; prepared, elementwise.
        exchange: The all-reduce.
        state: The algorithm's state; cut into slices along the chunks.
        parcel_elements: Longest parcel.
        num_workers: Number of workers N.
    """

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        parcel_elements: int,
        num_workers: int,
    ) -> None:
        self._table_elements = num_workers * len(Row._fields)
        super().__init__(layout, algorithm, exchange, state, parcel_elements, self._table_elements)
        self._first: UnderWay | None = None

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Send the row with the first parcel, or by itself if all workers are at a meeting."""
        if row.place == ROUND:
            rows = self._send_with_first_parcel(group, row, place)
            if group.board is not None:  # while the parcel travels: only those at a meeting read it
                with explained(group, place):
                    group.board.post(makes_round=True)
            return rows
        if group.board is not None and group.watchdog is not None:
            with waiting(statistics), explained(group, place):
                group.board.post(makes_round=False)
                joins = group.board.anyone_makes_round(group.watchdog, place, group.timeout_s)
            if joins:
                return self._send_with_first_parcel(group, row, place)
        return start_rows(group, statistics, row, place)

    def _send_with_first_parcel(self, group: WorkerGroup, row: Row, place: str) -> PendingRows:
        announce_place(group, place)
        parcel, slot = self._parcels[0], self._slots[0]
        params = slot[: len(parcel)]
        self._propose(parcel, params, progress=row.weight > 0)
        carrier = slot[: len(parcel) + self._table_elements]
        write_row(carrier[len(parcel) :].view(-1, len(row)), group.worker, row)
        handle = self._exchange.start(carrier, int(row.round_index))
        self._first = (parcel, params, handle)
        return PendingRows(lambda: handle.wait(1.0)[len(parcel) :].view(-1, len(row)), place)

    def _send(self, parcel: Parcel, slot: Tensor, round_index: int, progress: bool) -> UnderWay:
        if self._first is not None and self._first[0] is parcel:
            first, self._first = self._first, None
            return first
        return super()._send(parcel, slot, round_index, progress)
