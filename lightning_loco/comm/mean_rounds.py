"""Blocking rounds of an all-reduce whose first chunk carries the workers' rows along.

A separate exchange of the rows would cost as much time as a small model's parameters. A worker that
waits at a meeting sends the first chunk as well; if nobody makes a round, its sum is not used.
"""

from __future__ import annotations

from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.control import PendingRows, Row, announce_place, write_row
from lightning_loco.comm.exchange import Exchange, Handle
from lightning_loco.comm.flat import Chunk, FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rounds import BlockingRounds, UnderWay
from lightning_loco.comm.stats import Statistics


class MeanRounds(BlockingRounds):
    """Like :class:`BlockingRounds`, for the mean over all workers and without a second exchange.

    Args:
        layout: The trainable parameters; at least one.
        algorithm: What to compute; prepared, elementwise.
        exchange: The all-reduce.
        state: The algorithm's state; cut into slices along the chunks.
        num_workers: Number of workers N.
    """

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        num_workers: int,
    ) -> None:
        self._table_elements = num_workers * len(Row._fields)
        super().__init__(layout, algorithm, exchange, state, self._table_elements)
        self._first: UnderWay | None = None

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Send the first chunk with the row behind it."""
        chunk, slot = next(self._chunks_and_slots())
        params = slot[: len(chunk)]
        message = self._propose(chunk, params, progress=row.weight > 0)
        if message is not params:
            params.copy_(message)
        carrier = slot[: len(chunk) + self._table_elements]
        write_row(carrier[len(chunk) :].view(-1, len(row)), group.worker, row)
        announce_place(group, place)
        handle = _Carrier(self._exchange.start(carrier, int(row.round_index)), len(chunk))
        self._first = (chunk, params, handle)
        return PendingRows(lambda: handle.table().view(-1, len(row)), place)

    def _send(self, chunk: Chunk, slot: Tensor, round_index: int, progress: bool) -> UnderWay:
        if chunk.start == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        return super()._send(chunk, slot, round_index, progress)


class _Carrier:
    """A message with a table behind it, both summed."""

    def __init__(self, handle: Handle, length: int) -> None:
        self._handle = handle
        self._length = length

    def table(self) -> Tensor:
        """Wait and return the sum of the tables."""
        return self._handle.wait(1.0)[self._length :]

    def wait(self, total_weight: float) -> Tensor:
        """Wait and return the mean of the messages."""
        return self._handle.wait(1.0)[: self._length].div_(total_weight)
