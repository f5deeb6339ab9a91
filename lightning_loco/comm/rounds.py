"""One round over all chunks: pack, propose, exchange, apply, unpack, with several under way.

The chunks pass through a small kept buffer (the *bucket*), so that a round needs no memory of the
model's size, and each chunk stays in the cache while it is worked on.
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

CHUNKS_IN_FLIGHT = 2

UnderWay = tuple[Chunk, Tensor, Handle]
"""A chunk, what propose has left in its slot, and its message."""


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


class BlockingRounds:
    """Rounds whose result is applied before the next local step.

    Args:
        layout: The trainable parameters.
        algorithm: What to compute; prepared.
        exchange: How messages move.
        state: The algorithm's state; cut into slices along the chunks.
        extra_elements: Room to keep behind each chunk in the bucket.
    """

    staleness = 0

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        extra_elements: int = 0,
    ) -> None:
        self._layout = layout
        self._algorithm = algorithm
        self._exchange = exchange
        self.state = state
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self._loaded = False
        self._squares: list[Tensor] = []
        longest = max((len(chunk) for chunk in layout.chunks()), default=0)
        self._slots = [
            torch.empty(longest + extra_elements, dtype=layout.dtype, device=layout.device)
            for _ in range(self._num_slots())
        ]

    def load(self) -> bool:
        """Prepare a round as far as possible alone, and say whether the parameters are finite.

        A model that fits into the bucket is packed here, so that one look at the packed values
        replaces one at each parameter.
        """
        chunks = self._layout.chunks()
        self._loaded = len(chunks) <= len(self._slots)
        if not self._loaded:
            return self._layout.is_finite()
        total = torch.zeros((), dtype=self._layout.dtype, device=self._layout.device)
        for chunk, slot in self._chunks_and_slots():
            params = slot[: len(chunk)]
            read_local(chunk, params, self._algorithm, self._slice(chunk))
            total += params.sum()
        return bool(torch.isfinite(total)) or self._layout.is_finite()

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
        for chunk, slot in self._chunks_and_slots():
            if len(under_way) == len(self._slots):
                self._complete(*under_way.popleft(), total_weight())
            under_way.append(self._send(chunk, slot, round_index, progress))
        while under_way:
            self._complete(*under_way.popleft(), total_weight())
        self._finish_norm()

    def _send(self, chunk: Chunk, slot: Tensor, round_index: int, progress: bool) -> UnderWay:
        params = slot[: len(chunk)]
        message = self._propose(chunk, params, progress)
        return chunk, params, self._exchange.start(message, round_index)

    def drain(self) -> None:
        """Apply what is under way between rounds: nothing here."""

    def pending(self) -> Tensor | None:
        """What has been received but not applied yet, for a checkpoint: nothing here."""
        return None

    def restore_pending(self, received: Tensor | None) -> None:
        """Take back what :meth:`pending` has returned."""
        if received is not None:
            raise ValueError("The checkpoint holds a round under way, but overlap is off.")

    def _num_slots(self) -> int:
        return max(1, min(CHUNKS_IN_FLIGHT, len(self._layout.chunks())))

    def _chunks_and_slots(self) -> Iterator[tuple[Chunk, Tensor]]:
        for index, chunk in enumerate(self._layout.chunks()):
            yield chunk, self._slots[index % len(self._slots)]

    def _slice(self, chunk: Chunk) -> State:
        return slice_state(self._algorithm, self.state, chunk)

    def _propose(self, chunk: Chunk, params: Tensor, progress: bool) -> Tensor:
        with record_function("loco/propose"):
            state = self._slice(chunk)
            if not progress:
                self._algorithm.restart(params, state)
            elif not self._loaded:
                read_local(chunk, params, self._algorithm, state)
            return self._algorithm.propose(params, state)

    def _complete(self, chunk: Chunk, params: Tensor, handle: Handle, total_weight: float) -> None:
        with record_function("loco/exchange"):
            received = handle.wait(total_weight)
        with record_function("loco/apply"):
            chunk.unpack(self._update(chunk, params, received))

    def _update(self, chunk: Chunk, params: Tensor, received: Tensor) -> Tensor:
        state = self._slice(chunk)
        if self.measure_gradient:
            gradient = self._algorithm.outer_gradient(params, received, state)
            if gradient is not None:
                self._squares.append(torch.linalg.vector_norm(gradient))
        return self._algorithm.update(params, received, state)

    def _finish_norm(self) -> None:
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []


class OverlappedRounds(BlockingRounds):
    """Rounds whose result is applied at the end of the next local phase.

    At a boundary, per chunk: the pseudo-gradient is taken against the outer parameters as they are,
    the previous mean is applied to them, local parameters restart from them, and the new message
    leaves. The messages need memory of the model's size while they travel.

    Args:
        layout: The trainable parameters.
        algorithm: What to compute; must support overlap.
        exchange: How messages move.
        state: The algorithm's state.
        warm_start: Make the first round a blocking one.
    """

    staleness = 1

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: Exchange,
        state: State,
        warm_start: bool,
    ) -> None:
        super().__init__(layout, algorithm, exchange, state)
        self._warm_start = warm_start
        self._messages = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        self._handles: list[Handle] | None = None
        self._total_weight: Callable[[], float] = lambda: 1.0

    def _num_slots(self) -> int:
        return max(2, super()._num_slots())

    def load(self) -> bool:
        """Look at the parameters; the slots are needed for what comes back as well."""
        self._loaded = False
        return self._layout.is_finite()

    def run(self, round_index: int, progress: bool, total_weight: Callable[[], float]) -> None:
        """Apply the previous result and send the new messages."""
        if self._warm_start and round_index == 0:
            super().run(round_index, progress, total_weight)
            return
        previous, self._handles = self._handles, []
        for index, chunk in enumerate(self._layout.chunks()):
            proposal, params = (slot[: len(chunk)] for slot in self._slots[:2])
            message = self._messages[chunk.start : chunk.stop]
            proposal = self._propose(chunk, proposal, progress)
            if previous is None:
                self._algorithm.restart(params, self._slice(chunk))
                chunk.unpack(params)
            else:
                self._complete(chunk, params, previous[index], self._total_weight())
            message.copy_(proposal)
            self._handles.append(self._exchange.start(message, round_index))
        self._total_weight = total_weight
        self._finish_norm()

    def drain(self) -> None:
        """Wait for the messages under way and apply them."""
        if self._handles is None:
            return
        for (chunk, slot), handle in zip(self._chunks_and_slots(), self._handles, strict=True):
            self._complete(chunk, slot[: len(chunk)], handle, self._total_weight())
        self._handles = None
        self._finish_norm()

    def pending(self) -> Tensor | None:
        """Wait for the messages under way and return the mean ``(P,)`` to be applied next."""
        if self._handles is None:
            return None
        weight = self._total_weight()
        self._handles = [_Arrived(handle.wait(weight)) for handle in self._handles]
        return self._messages.clone()

    def restore_pending(self, received: Tensor | None) -> None:
        """Take back what :meth:`pending` has returned."""
        if received is None:
            self._handles = None
            return
        self._messages.copy_(received)
        self._handles = [
            _Arrived(self._messages[chunk.start : chunk.stop]) for chunk in self._layout.chunks()
        ]


class _Arrived:
    """A handle whose wait is over."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self, total_weight: float) -> Tensor:
        return self._received
