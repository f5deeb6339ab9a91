"""One round over all parameters: pack, propose, exchange, apply, unpack.

Chunks are small, so that they stay in the processor's cache from one operation to the next. Parcels
are what travels: many chunks, because every exchange has fixed costs. Parcels pass through a kept
buffer (the *bucket*), so that a round needs no memory of the model's size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.control import PendingRows, Row, start_rows
from lightning_loco.comm.exchange import Exchange, Handle
from lightning_loco.comm.flat import Chunk, FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics

PARCELS_IN_FLIGHT = 2


def slice_state(algorithm: Algorithm, state: State, chunk: Chunk) -> State:
    """The part of an elementwise algorithm's state that belongs to a chunk."""
    if not algorithm.elementwise:
        return state
    return {key: value[chunk.start : chunk.stop] for key, value in state.items()}


def read_local(chunk: Chunk, params: Tensor, algorithm: Algorithm, state: State) -> None:
    """Pack the local parameters, exact to the drift.

    Parameters in a narrow dtype (bfloat16) were rounded when the round began. What was lost then is
    added again, or the algorithm would take it for a drift and undo small steps of its masters.
    """
    if chunk.is_rounded(params.dtype):
        algorithm.restart(params, state)
        lost = chunk.rounding_error(params)
        chunk.pack(params)
        params.add_(lost)
    else:
        chunk.pack(params)


class Parcel:
    """Consecutive chunks that travel together."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.start = chunks[0].start
        self.stop = chunks[-1].stop

    def __len__(self) -> int:
        return self.stop - self.start

    def parts(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk with its part of ``flat``, of shape ``(len(self),)`` or longer."""
        for chunk in self.chunks:
            yield chunk, flat[chunk.start - self.start : chunk.stop - self.start]


UnderWay = tuple[Parcel, Tensor, Handle]
"""A parcel, what propose has left in its slot, and its message."""


class BlockingRounds:
    """Rounds whose result is applied before the next local step.

    Args:
        layout: The trainable parameters.
        algorithm: What to compute; prepared.
        exchange: How messages move.
        state: The algorithm's state; cut into slices along the chunks.
        parcel_elements: Longest parcel; the bucket holds two of them.
        extra_elements: Room to keep behind each parcel in the bucket.
    """

    staleness = 0

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        parcel_elements: int = 0,
        extra_elements: int = 0,
    ) -> None:
        self._layout = layout
        self._algorithm = algorithm
        self._exchange = exchange
        self.state = state
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self._squares: list[Tensor] = []
        self._parcel_elements = parcel_elements
        self._parcels: list[Parcel] = []
        self._proposed = False
        self._make_parcels()
        self._slots = [
            torch.empty(length, dtype=layout.dtype, device=layout.device)
            for length in self._slot_lengths(extra_elements)
        ]

    def _slot_lengths(self, extra_elements: int) -> list[int]:
        longest = max((len(parcel) for parcel in self._parcels), default=0)
        return [longest + extra_elements] * min(PARCELS_IN_FLIGHT, len(self._parcels))

    def _make_parcels(self) -> None:
        chunks = self._layout.chunks()
        if self._parcels and chunks[0] is self._parcels[0].chunks[0]:
            return
        groups: list[list[Chunk]] = []
        for chunk in chunks:
            if groups and chunk.stop - groups[-1][0].start <= self._parcel_elements:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        self._parcels = [Parcel(group) for group in groups]

    def load(self) -> bool:
        """Prepare a round as far as possible alone, and say whether the parameters are finite.

        The messages of a model that fits into the bucket are made here: then a look at the packed
        values, still in the cache, replaces one at the parameters.
        """
        self._make_parcels()
        self._proposed = len(self._parcels) <= len(self._slots)
        if not self._proposed:
            return self._layout.is_finite()
        sums = []
        for parcel, slot in zip(self._parcels, self._slots, strict=False):
            for chunk, params in parcel.parts(slot):
                state = slice_state(self._algorithm, self.state, chunk)
                read_local(chunk, params, self._algorithm, state)
                sums.append(params.sum())
                self._propose_into(params, state)
        finite = not sums or bool(torch.isfinite(torch.stack(sums)).all())
        return finite or self._layout.is_finite()

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Exchange the rows of all workers, before a round or at a meeting.

        Args:
            group: The workers.
            statistics: Where the waiting is counted.
            row: What this worker tells; after :meth:`load`.
            place: Where this worker is, in words.
        """
        return start_rows(group, statistics, row, place)

    def run(self, round_index: int, progress: bool, total_weight: Callable[[], float]) -> None:
        """Make one round, after :meth:`load` and :meth:`announce`.

        Args:
            round_index: Number of the round, equal on all workers.
            progress: False when this worker has made no valid progress since the last round.
            total_weight: Called once messages are under way; waits for the other workers' weights.
        """
        under_way: deque[UnderWay] = deque()
        for index, parcel in enumerate(self._parcels):
            if len(under_way) == len(self._slots):
                self._complete(*under_way.popleft(), total_weight())
            slot = self._slots[index % len(self._slots)]
            under_way.append(self._send(parcel, slot, round_index, progress))
        while under_way:
            self._complete(*under_way.popleft(), total_weight())
        self._finish_norm()

    def _send(self, parcel: Parcel, slot: Tensor, round_index: int, progress: bool) -> UnderWay:
        params = slot[: len(parcel)]
        self._propose(parcel, params, progress)
        return parcel, params, self._exchange.start(params, round_index)

    def _propose(self, parcel: Parcel, params: Tensor, progress: bool) -> None:
        """Put the messages of a parcel into ``params``."""
        if progress and self._proposed:
            return
        with record_function("loco/propose"):
            for chunk, part in parcel.parts(params):
                self._propose_chunk(chunk, part, progress)

    def _propose_chunk(self, chunk: Chunk, params: Tensor, progress: bool) -> None:
        state = slice_state(self._algorithm, self.state, chunk)
        if progress:
            read_local(chunk, params, self._algorithm, state)
        else:
            self._algorithm.restart(params, state)
        self._propose_into(params, state)

    def _propose_into(self, params: Tensor, state: State) -> None:
        message = self._algorithm.propose(params, state)
        if message is not params:
            params.copy_(message)

    def _complete(self, parcel: Parcel, params: Tensor, handle: Handle, weight: float) -> None:
        with record_function("loco/exchange"):
            received = handle.wait(1.0)
        with record_function("loco/apply"):
            for chunk, part in parcel.parts(received):
                start = chunk.start - parcel.start
                self._update(chunk, params[start : start + len(chunk)], part, weight)

    def _update(self, chunk: Chunk, params: Tensor, received: Tensor, weight: float) -> None:
        state = slice_state(self._algorithm, self.state, chunk)
        self._exchange.normalize(received, weight)
        if self.measure_gradient:
            gradient = self._algorithm.outer_gradient(params, received, state)
            if gradient is not None:
                self._squares.append(torch.linalg.vector_norm(gradient))
        chunk.unpack(self._algorithm.update(params, received, state))

    def _finish_norm(self) -> None:
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []

    def drain(self) -> None:
        """Apply what is under way between rounds: nothing here."""

    def pending(self) -> Tensor | None:
        """What has been received but not applied yet, for a checkpoint: nothing here."""
        return None

    def restore_pending(self, received: Tensor | None) -> None:
        """Take back what :meth:`pending` has returned."""
        if received is not None:
            raise ValueError("The checkpoint holds a round under way, but overlap is off.")
