"""Chunks of the parameters that fit the cache, and the buckets that they are sent in.

Chunks are small, so that one stays in the processor's cache from one operation to the next. Buckets
are large, because every collective has fixed costs. Both keep views of the parameters and of the
messages, because making views of many small tensors takes longer than copying them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.compression import Compression
from lightning_loco.model.flat import Chunk

T = TypeVar("T")


class BucketChunk:
    """One chunk of a bucket: parameters, their part of the message, and slices of the state.

    Args:
        params: The chunk of the parameters.
        message: Memory for the message, as long as the algorithm says.
        algorithm: What a round computes.
        state: The algorithm's state, cut to this chunk.
        sent_params: Memory for the parameters as they were sent, if they are kept.
        scratch: Memory of ``len(params)`` elements or more. Default: the message, if it is as long.
        compression: How messages are compressed.
        residual: State of the compression, cut to this chunk.
        is_partial: Whether messages are shorter than slices of the parameters; the message of a
            short slice may still be as long.
    """

    def __init__(
        self,
        params: Chunk,
        message: Tensor,
        algorithm: Algorithm,
        state: State,
        sent_params: Tensor | None = None,
        scratch: Tensor | None = None,
        compression: Compression | None = None,
        residual: State | None = None,
        is_partial: bool = False,
    ) -> None:
        self.params = params
        self.message = message
        self.state = state
        self.residual = residual or {}
        self.is_partial = is_partial
        self.sent_params = sent_params
        self.scratch = message if scratch is None else scratch[: len(params)]
        self._algorithm = algorithm
        self._compression = compression
        self._is_rounded = params.is_rounded(message.dtype)
        ends = itertools.accumulate((view.numel() for view in params.views), initial=0)
        self._bounds = tuple(itertools.pairwise(ends))
        kept = [message, self.scratch, sent_params, *self.state.values()]
        shape = (len(params),)
        self._kept = [v for v in kept if isinstance(v, Tensor) and v.shape == shape]
        self._packings = {id(v): params.packing(v) for v in self._kept}

    def __len__(self) -> int:
        return len(self.params)

    def info_of(self, info: RoundInfo) -> RoundInfo:
        """The info of a round for this chunk: with its position and the bounds of its tensors."""
        return dataclasses.replace(info, start=self.params.whole_position, bounds=self._bounds)

    def pack(self, into: Tensor) -> None:
        """Copy the local parameters into ``into``, of shape ``(len(self),)``."""
        (self._packings.get(id(into)) or self.params.packing(into)).pack()

    def unpack(self, values: Tensor) -> None:
        """Copy ``values``, of shape ``(len(self),)``, into the model."""
        (self._packings.get(id(values)) or self.params.packing(values)).unpack()

    def pack_exact(self, into: Tensor) -> None:
        """Copy the local parameters into ``into`` without the error of their last rounding.

        Parameters in a narrow dtype (bfloat16) were rounded when they were written last. The
        rounding error is added again; otherwise the algorithm would take it for progress and undo
        small steps of the float32 outer parameters.
        """
        self.pack(into)
        if self._is_rounded:
            written = self.round_start() if self.sent_params is None else self.sent_params
            if written is not None:
                into.add_(self.params.rounding_error(written))

    def round_start(self) -> Tensor | None:
        """The parameters at the start of the round; None if the algorithm does not keep them."""
        start = self._algorithm.round_start(self.state)
        if start is None or self._compression is None:
            return start
        return self._compression.local_params(start, self.residual)

    def propose(self, params: Tensor, into: Tensor, info: RoundInfo) -> None:
        """Write the message that follows from ``params`` into ``into``; both may be the same."""
        reach("packing")
        message = self._algorithm.propose(params, self.state, self.info_of(info))
        if message is not into:
            if message.shape != into.shape:
                raise RuntimeError(
                    f"{type(self._algorithm).__name__}.propose has made a message of shape "
                    f"{tuple(message.shape)} for {len(self)} parameters, and message_length says "
                    f"{len(into)}."
                )
            into.copy_(message)
        if self._compression is not None:
            self._compression.prepare_message(into, self.residual)

    def restart(self, info: RoundInfo) -> None:
        """Write the parameters from which local steps continue once the message is sent."""
        info = self.info_of(info)
        if (start := self._algorithm.on_send(self.message, None, self.state, info)) is not None:
            self.unpack(start)

    def keep_lost(self, lost: Tensor, was_prepared: bool) -> None:
        """Keep the loss for the next round; see :meth:`Compression.update_residual`."""
        if self._compression is not None:
            self._compression.update_residual(lost, self.residual, was_prepared)

    def decode(self, received: Tensor) -> None:
        """Turn a received message, in place, into the values without compression."""
        if self._compression is not None:
            self._compression.add_reference(received, self.residual)

    def record_received(self, received: Tensor) -> None:
        """Let the compression update its reference with the decoded result."""
        if self._compression is not None:
            self._compression.update_reference(received, self.residual)

    def combine(self, messages: Tensor, info: RoundInfo) -> Tensor:
        """Combine the messages of all workers, ``(N, len(message))``."""
        return self._algorithm.combine(messages, self.info_of(info))

    def update(self, received: Tensor, info: RoundInfo, next_message: Tensor | None) -> Tensor:
        """Compute the result of a round from the received message of this chunk.

        ``next_message`` is the message of the next round, if it is sent at the same time.
        """
        info, own = self.info_of(info), self.message
        if self.is_partial:
            own = self.scratch
            self.pack_exact(own)
        if next_message is None:
            return self._algorithm.update(own, received, self.state, info)
        result = self._algorithm.on_send(next_message, (own, received), self.state, info)
        assert result is not None
        return result

    def local_start(self, result: Tensor) -> Tensor:
        """The parameters from which local steps continue, given the result of a round."""
        if self._compression is None:
            return result
        return self._compression.local_params(result, self.residual, out=self.scratch)


class Bucket:
    """Chunks that travel in one collective: their messages, then in the first one the statuses.

    Attributes:
        wire: The memory that is sent.
        chunks: In order.
        statuses: The end of ``wire``, behind the messages; empty in all buckets but the first.
    """

    def __init__(self, wire: Tensor, chunks: list[BucketChunk]) -> None:
        self.wire = wire
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

    def keep_lost(self, lost: Tensor | None, was_prepared: bool) -> None:
        """Let each chunk keep its slice of the loss, if that is fed back."""
        for chunk, part in self.split(lost) if lost is not None else ():
            chunk.keep_lost(part, was_prepared)

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
