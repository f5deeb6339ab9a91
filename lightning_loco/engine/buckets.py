"""Chunks of the parameters that fit the cache, and the buckets that they are sent in.

Chunks are small, so that one stays in the processor's cache from one operation to the next. Buckets
are large, because every collective has fixed costs. Both keep views of the parameters and of the
messages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_loco.algorithms import RoundInfo, State
from lightning_loco.model.flat import Chunk

T = TypeVar("T")


class BucketChunk:
    """One chunk of a bucket: parameters, their part of the message, and slices of the state.

    Args:
        params: The chunk of the parameters.
        message: Memory for the message, as long as the algorithm says.
        state: The algorithm's state, cut to this chunk.
        residual: State of the compression, cut to this chunk.
        sent_params: Memory for the parameters as they were sent, if they are kept.
        own_message: What the algorithm's update gets as this worker's message, as long as
            ``message``; None if it does not read it.
        local: Memory of ``len(params)`` elements or more for the parameters that it gets; None if
            it does not read them.
        scratch: Memory of ``len(params)`` elements or more. Default: the message, if it is as long.
        round_start: Returns the parameters at the start of the round; None if the algorithm does
            not keep them.
    """

    def __init__(
        self,
        params: Chunk,
        message: Tensor,
        state: State,
        residual: State | None = None,
        sent_params: Tensor | None = None,
        own_message: Tensor | None = None,
        local: Tensor | None = None,
        scratch: Tensor | None = None,
        round_start: Callable[[BucketChunk], Tensor | None] = lambda chunk: None,
    ) -> None:
        self.params = params
        self.message = message
        self.state = state
        self.residual = residual or {}
        self.sent_params = sent_params
        self.own_message = own_message
        self.local = None if local is None else local[: len(params)]
        # A blocking round needs the memory of its message no longer when the result is written.
        self.scratch = message if scratch is None else scratch[: len(params)]
        self._round_start = round_start
        self._is_rounded = params.is_rounded(message.dtype)
        ends = itertools.accumulate((view.numel() for view in params.views), initial=0)
        self._bounds = tuple(itertools.pairwise(ends))
        kept = [message, self.scratch, self.local, sent_params, *self.state.values()]
        shape = (len(params),)
        # Views of many small tensors take longer to make than to copy, so they are kept.
        self._kept = [v for v in kept if isinstance(v, Tensor) and v.shape == shape]
        self._packings = {id(v): params.packing(v) for v in self._kept}

    def __len__(self) -> int:
        return len(self.params)

    def info_of(self, info: RoundInfo) -> RoundInfo:
        """The info of a round for this chunk: with its position and the bounds of its tensors."""
        return dataclasses.replace(info, start=self.params.whole_position, bounds=self._bounds)

    def round_start(self) -> Tensor | None:
        """The parameters at the start of the round; None if the algorithm does not keep them."""
        return self._round_start(self)

    def pack(self, into: Tensor) -> None:
        """Copy the local parameters into ``into`` without the error of their last rounding.

        Parameters in a narrow dtype (bfloat16) were rounded when they were written last. The
        rounding error is added again; otherwise the algorithm would take it for progress and undo
        small steps of the float32 outer parameters.
        """
        (self._packings.get(id(into)) or self.params.packing(into)).pack()
        if self._is_rounded:
            written = self.round_start() if self.sent_params is None else self.sent_params
            if written is not None:
                into.add_(self.params.rounding_error(written))

    def unpack(self, values: Tensor) -> None:
        """Copy ``values``, of shape ``(len(self),)``, into the model."""
        (self._packings.get(id(values)) or self.params.packing(values)).unpack()


class Bucket:
    """Chunks that travel in one collective: their messages, then in the first one the statuses.

    Attributes:
        wire: The memory that is sent.
        own_message: What is kept of this worker's message, ``(len(self),)``, if it is.
        chunks: In order.
        statuses: The end of ``wire``, behind the messages; empty in all buckets but the first.
    """

    def __init__(
        self, wire: Tensor, chunks: list[BucketChunk], own_message: Tensor | None = None
    ) -> None:
        self.wire = wire
        self.own_message = own_message
        self.chunks = chunks
        self._lengths = [len(chunk.message) for chunk in chunks]
        self._length = sum(self._lengths)
        self.statuses = wire[self._length :]

    def __len__(self) -> int:
        return self._length

    @property
    def message(self) -> Tensor:
        """The memory of the message alone, of shape ``(len(self),)``."""
        return self.wire[: self._length]

    @property
    def start(self) -> int:
        """Position of its first parameter in the flat vector."""
        return self.chunks[0].params.start

    def split(self, received: Tensor) -> Iterator[tuple[BucketChunk, Tensor]]:
        """Yield each chunk with its slice of a received message.

        Args:
            received: A message, ``(len(self),)`` or longer; or one per worker, in rows.
        """
        parts = torch.split_with_sizes(received[..., : self._length], self._lengths, dim=-1)
        yield from zip(self.chunks, parts, strict=True)


def slice_state(state: State, numel: int, params: Chunk) -> State:
    """The state of a chunk: slices of entries of shape ``(numel,)``, copies of all others."""
    sliced: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            is_cut = value.shape == (numel,)
            value = value[params.start : params.stop] if is_cut else value.clone()
        sliced[key] = value
    return sliced


def group_chunks(
    chunks: Sequence[T], message_length: Callable[[T], int], longest: int
) -> list[list[T]]:
    """Group neighbouring chunks whose messages have up to ``longest`` elements together.

    The message of a single chunk may be longer.
    """
    groups: list[list[T]] = []
    length = 0
    for chunk in chunks:
        added = message_length(chunk)
        if not groups or length + added > longest:
            groups.append([])
            length = 0
        groups[-1].append(chunk)
        length += added
    return groups
