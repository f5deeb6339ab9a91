"""What a round works on: parts, small enough for the cache, and buckets of them, which travel.

Parts are small, so that they stay in the processor's cache from one operation to the next. Buckets
are long, because every exchange has fixed costs. Both are tied to their memory once, because making
views of many small tensors takes longer than copying them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.compression import Compression
from lightning_loco.fault_points import reach
from lightning_loco.parameters.flat import Chunk


def slice_state(state: State, numel: int, chunk: Chunk) -> State:
    """The state of a chunk: entries of shape ``(numel,)`` cut along, a copy of everything else."""
    sliced: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            is_cut = value.shape == (numel,)
            value = value[chunk.start : chunk.stop] if is_cut else value.clone()
        sliced[key] = value
    return sliced


class Part:
    """A chunk of the parameters with its memory in a message and its slice of the state.

    Args:
        chunk: The pieces of parameters.
        message: Where the message is made, of shape ``(len(chunk),)``.
        algorithm: What a round computes.
        state: The algorithm's slice.
        departure: Where the parameters that left are kept, if they are.
        scratch: Memory of the same length or longer. Default: the message's.
        compression: How messages are compressed.
        residual: What that remembers, likewise.
    """

    def __init__(
        self,
        chunk: Chunk,
        message: Tensor,
        algorithm: Algorithm,
        state: State,
        sent_params: Tensor | None = None,
        scratch: Tensor | None = None,
        compression: Compression | None = None,
        residual: State | None = None,
    ) -> None:
        self.chunk = chunk
        self.message = message
        self.state = state
        self.residual = residual or {}
        self.sent_params = sent_params
        self.scratch = message if scratch is None else scratch[: len(chunk)]
        self._algorithm = algorithm
        self._compression = compression
        self._is_rounded = chunk.is_rounded(message.dtype)
        kept = [message, self.scratch, sent_params, *self.state.values()]
        self._kept = [v for v in kept if isinstance(v, Tensor) and v.shape == message.shape]
        self._windows = {id(v): chunk.tied(v) for v in self._kept}

    def __len__(self) -> int:
        return len(self.chunk)

    def pack(self, into: Tensor) -> None:
        """Copy the local parameters as they are, into memory of shape ``(len(self),)``."""
        (self._windows.get(id(into)) or self.chunk.tied(into)).pack()

    def unpack(self, values: Tensor) -> None:
        """Copy ``values``, of shape ``(len(self),)``, into the model."""
        (self._windows.get(id(values)) or self.chunk.tied(values)).unpack()

    def start(self) -> Tensor | None:
        """The parameters at which the round began, if the algorithm remembers them."""
        start = self._algorithm.restart(self.state)
        if start is None or self._compression is None:
            return start
        return self._compression.begin(start, self.residual)

    def read_local(self, into: Tensor) -> None:
        """Pack the local parameters, exact to the drift.

        Parameters in a narrow dtype (bfloat16) were rounded when they were written last. What was
        lost then is added again, or the algorithm would take it for a drift and undo small steps
        of its masters.
        """
        self.pack(into)
        if self._is_rounded:
            written = self.start() if self.sent_params is None else self.sent_params
            if written is not None:
                into.add_(self.chunk.rounding_error(written))

    def propose(self, params: Tensor) -> None:
        """Replace the parameters by the message."""
        reach("packing")
        message = self._algorithm.propose(params, self.state)
        if message is not params:
            params.copy_(message)
        if self._compression is not None:
            self._compression.prepare(params, self.residual)

    def keep(self, lost: Tensor, was_prepared: bool) -> None:
        """Remember what was lost of a message; see :meth:`Compression.keep`."""
        if self._compression is not None:
            self._compression.keep(lost, self.residual, was_prepared)

    def make_absolute(self, received: Tensor) -> None:
        """Make of what was received what it would be without compression."""
        if self._compression is not None:
            self._compression.make_absolute(received, self.residual)

    def note_received(self, received: Tensor) -> None:
        """Remember what the algorithm is about to get, if compression needs to know."""
        if self._compression is not None:
            self._compression.land(received, self.residual)

    def begin_again(self) -> None:
        """Let local steps begin again, right before the message leaves that was made."""
        if (start := self._algorithm.on_send(self.message, None, self.state)) is not None:
            self.unpack(start)

    def end(self, received: Tensor, leaving: Tensor | None) -> Tensor:
        """The result of a round, at whose end another message may leave."""
        if leaving is None:
            return self._algorithm.update(self.message, received, self.state)
        result = self._algorithm.on_send(leaving, (self.message, received), self.state)
        assert result is not None
        return result

    def begin(self, result: Tensor) -> Tensor:
        """Where local steps begin, given the result of a round that has ended."""
        if self._compression is None:
            return result
        return self._compression.begin(result, self.residual, out=self.scratch)


class Bucket:
    """Parts that travel together.

    Args:
        wire: The memory that is sent: the message, and what rides behind it.
        parts: What the message is made of; each knows its slice of the flat vector.
    """

    def __init__(self, wire: Tensor, parts: list[Part]) -> None:
        self.wire = wire
        self.parts = parts
        self._lengths = [len(part) for part in parts]
        self._length = sum(self._lengths)

    def __len__(self) -> int:
        return self._length

    @property
    def slices(self) -> list[range]:
        """Which elements of the flat vector it carries."""
        return [range(part.chunk.start, part.chunk.stop) for part in self.parts]

    def keep(self, lost: Tensor | None, was_prepared: bool) -> None:
        """Have each part remember its share of what was lost, if somebody asks."""
        for part, share in self.split(lost) if lost is not None else ():
            part.keep(share, was_prepared)

    def split(self, received: Tensor, weight: float = 1.0) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its share of what was received, of shape ``(len(self),)`` or longer.

        Sums are divided by the total ``weight``, in place.
        """
        shares = torch.split_with_sizes(received[: self._length], self._lengths)
        for part, share in zip(self.parts, shares, strict=True):
            yield part, share if weight == 1 else share.div_(weight)


class Handle(Protocol):
    """A bucket under way."""

    @property
    def lost(self) -> Tensor | None:
        """Once it is here, what was lost of the own message, in its place; None if nobody asks."""

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once; never waits."""

    def wait(self) -> Tensor:
        """Return what was received, perhaps in the message's memory; called once."""

    def release(self) -> None:
        """What was received has been used, and its memory may serve again."""


class Arrived(NamedTuple):
    """A handle whose wait is over."""

    received: Tensor
    lost: Tensor | None = None

    def has_arrived(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> Tensor:
        """What was received."""
        return self.received

    def release(self) -> None:
        """The memory belongs to someone else."""


def group_chunks(chunks: list[Chunk], longest: int) -> list[list[Chunk]]:
    """Put neighbouring chunks together, up to ``longest`` elements if a chunk is not longer."""
    groups: list[list[Chunk]] = []
    length = 0
    for chunk in chunks:
        if not groups or length + len(chunk) > longest:
            groups.append([])
            length = 0
        groups[-1].append(chunk)
        length += len(chunk)
    return groups
