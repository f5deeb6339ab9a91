"""Blocking rounds of an all-reduce whose first parcel carries the workers' rows along.

A separate exchange of the rows would cost as much time as a small model's parameters. Only when all
workers are at a meeting, which the notice board tells, do the rows travel by themselves.
"""

from __future__ import annotations

from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import (
    ROUND,
    PendingRows,
    Row,
    announce_place,
    start_rows,
    write_row,
)
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed
from lightning_loco.rounds.exchange import Handle, MeanExchange, MeanHandle
from lightning_loco.rounds.parcels import Parcel
from lightning_loco.rounds.rounds import BlockingRounds

PATIENCE_S = 0.02
"""How long a round may travel before those at a meeting are told of it."""


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

    _exchange: MeanExchange

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: MeanExchange,
        state: State,
        parcel_elements: int,
        num_workers: int,
    ) -> None:
        table_elements = num_workers * len(Row._fields)
        super().__init__(layout, algorithm, exchange, state, parcel_elements, table_elements)
        longest = len(self._parcels[0])
        self._carrier = self._slots[0][: longest + table_elements]
        self._table = self._carrier[longest:].view(num_workers, len(Row._fields))
        self._first: MeanHandle | None = None
        self._invited = False

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Send the row with the first parcel, or by itself if all workers are at a meeting."""
        if group.board is not None:
            group.board.begin()
        if row.place == ROUND:
            return self._send_with_first_parcel(group, row, place)
        if group.board is not None and group.watchdog is not None:
            with Timed(statistics), Explained(group, place):
                group.board.post(makes_round=False)
                joins = group.board.anyone_makes_round(group.watchdog, place, group.timeout_s)
            if joins:
                return self._send_with_first_parcel(group, row, place)
        return start_rows(group, statistics, row, place)

    def _send_with_first_parcel(self, group: WorkerGroup, row: Row, place: str) -> PendingRows:
        announce_place(group, place)
        self._propose(self._parcels[0], progress=row.weight > 0)
        write_row(self._table, group.worker, row)
        self._invited = row.place != ROUND
        handle = self._first = self._exchange.start(self._carrier, int(row.round_index))

        def receive() -> Tensor:
            if not handle.arrives_within(PATIENCE_S):
                self._invite(group, place)
            handle.wait(1.0)
            return self._table

        return PendingRows(receive, place)

    def _invite(self, group: WorkerGroup, place: str) -> None:
        """Tell those who may be at a meeting that there is a round to make."""
        if group.board is not None and not self._invited:
            self._invited = True
            with Explained(group, place):
                group.board.post(makes_round=True)

    def _send(self, parcel: Parcel, round_index: int, progress: bool) -> Handle:
        if self._first is not None and parcel is self._parcels[0]:
            first, self._first = self._first, None
            return first
        return super()._send(parcel, round_index, progress)
