"""One round over all parameters: pack, propose, exchange, apply, unpack.

Parcels pass through a kept buffer (the *bucket*), so that a round needs no memory of the model's
size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.flat import Chunk, FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.labels import labelled
from lightning_loco.comm.rows import PendingRows, Row, start_rows
from lightning_loco.comm.stats import Statistics
from lightning_loco.rounds.exchange import Exchange, Handle
from lightning_loco.rounds.parcels import Parcel, Part, group_chunks

PARCELS_IN_FLIGHT = 2


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
        self._proposed = False
        self._tied_to: list[Chunk] = []
        self._parcels: list[Parcel] = []
        self._slots = [
            torch.empty(length, dtype=layout.dtype, device=layout.device)
            for length in self._slot_lengths(extra_elements)
        ]
        self._make_parcels()

    def _slot_lengths(self, extra_elements: int) -> list[int]:
        groups = group_chunks(self._layout.chunks(), self._parcel_elements)
        longest = max((group[-1].stop - group[0].start for group in groups), default=0)
        return [longest + extra_elements] * min(PARCELS_IN_FLIGHT, len(groups))

    def _make_parcels(self) -> None:
        """Tie all parcels to their memory; again when the parameters have moved."""
        chunks = self._layout.chunks()
        if chunks is self._tied_to:
            return
        groups = group_chunks(chunks, self._parcel_elements)
        self._parcels = [self._make_parcel(index, group) for index, group in enumerate(groups)]
        self._sums = torch.empty(len(chunks), dtype=self._layout.dtype, device=self._layout.device)
        self._tied_to = chunks

    def _make_parcel(self, index: int, chunks: list[Chunk]) -> Parcel:
        start = chunks[0].start
        message = self._slots[index % len(self._slots)][: chunks[-1].stop - start]
        return Parcel(
            message,
            [
                Part(c, message[c.start - start : c.stop - start], self._algorithm, self.state)
                for c in chunks
            ],
        )

    def load(self) -> bool:
        """Prepare a round as far as possible alone, and say whether the parameters are finite.

        The messages of a model that fits into the bucket are made here: then a look at the packed
        values, still in the cache, replaces one at the parameters.
        """
        self._make_parcels()
        self._proposed = len(self._parcels) <= len(self._slots)
        if not self._proposed:
            return self._layout.is_finite()
        parts = [part for parcel in self._parcels for part in parcel.parts]
        with labelled("loco/propose"):
            for part, total in zip(parts, self._sums.unbind(), strict=True):
                part.read_local()
                torch.sum(part.params, 0, out=total)
                part.propose()
        return all(map(math.isfinite, self._sums.tolist())) or self._layout.is_finite()

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
        under_way: deque[tuple[Parcel, Handle]] = deque()
        for parcel in self._parcels:
            if len(under_way) == len(self._slots):
                self._complete(*under_way.popleft(), total_weight())
            under_way.append((parcel, self._send(parcel, round_index, progress)))
        while under_way:
            self._complete(*under_way.popleft(), total_weight())
        self._finish_norm()

    def _send(self, parcel: Parcel, round_index: int, progress: bool) -> Handle:
        self._propose(parcel, progress)
        return self._exchange.start(parcel.message, round_index)

    def _propose(self, parcel: Parcel, progress: bool) -> None:
        """Make the message of a parcel."""
        if progress and self._proposed:
            return
        with labelled("loco/propose"):
            for part in parcel.parts:
                self._propose_part(part, progress)

    def _propose_part(self, part: Part, progress: bool) -> None:
        if progress:
            part.read_local()
        else:
            part.restart()
        part.propose()

    def _complete(self, parcel: Parcel, handle: Handle, weight: float) -> None:
        with labelled("loco/exchange"):
            received = handle.wait(1.0)
        with labelled("loco/apply"):
            for part, share in parcel.split(received):
                self._update(part, part.params, share, weight)

    def _update(self, part: Part, params: Tensor, received: Tensor, weight: float) -> None:
        self._exchange.normalize(received, weight)
        if self.measure_gradient:
            gradient = self._algorithm.outer_gradient(params, received, part.state)
            if gradient is not None:
                self._squares.append(torch.linalg.vector_norm(gradient))
        part.unpack(self._algorithm.update(params, received, part.state))

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
