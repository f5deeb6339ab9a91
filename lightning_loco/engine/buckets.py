"""Chunks of the parameters that fit the cache, and the buckets that they are sent in.

Chunks are small, so that one stays in the processor's cache from one operation to the next. Buckets
are large, because every collective has fixed costs. Both keep views of the parameters and of the
messages, because making views of many small tensors takes longer than copying them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.compression import Compression
from lightning_loco.fault_points import reach
from lightning_loco.parameters.flat import Chunk


class BucketChunk:
    """One chunk of a bucket: parameters, their part of the message, and slices of the state.

    Args:
        params: The chunk of the parameters.
        message: Memory for the message, of shape ``(len(params),)``.
        algorithm: What a round computes.
        state: The algorithm's state, cut to this chunk.
        sent_params: Memory for the parameters as they were sent, if they are kept.
        scratch: Memory of the same length or longer. Default: that of the message.
        compression: How messages are compressed.
        residual: State of the compression, cut to this chunk.
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
    ) -> None:
        self.params = params
        self.message = message
        self.state = state
        self.residual = residual or {}
        self.sent_params = sent_params
        self.scratch = message if scratch is None else scratch[: len(params)]
        self._algorithm = algorithm
        self._compression = compression
        self._is_rounded = params.is_rounded(message.dtype)
        kept = [message, self.scratch, sent_params, *self.state.values()]
        self._kept = [v for v in kept if isinstance(v, Tensor) and v.shape == message.shape]
        self._packings = {id(v): params.packing(v) for v in self._kept}

    def __len__(self) -> int:
        return len(self.params)

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
        start = self._algorithm.restart(self.state)
        if start is None or self._compression is None:
            return start
        return self._compression.local_params(start, self.residual)

    def propose(self, params: Tensor) -> None:
        """Replace ``params`` by the message."""
        reach("packing")
        message = self._algorithm.propose(params, self.state)
        if message is not params:
            params.copy_(message)
        if self._compression is not None:
            self._compression.prepare_message(params, self.residual)

    def restart(self) -> None:
        """Write the parameters from which local steps go on once the message is sent."""
        if (start := self._algorithm.on_send(self.message, None, self.state)) is not None:
            self.unpack(start)

    def keep_lost(self, lost: Tensor, was_prepared: bool) -> None:
        """Keep for the next round what was lost; see :meth:`Compression.update_residual`."""
        if self._compression is not None:
            self._compression.update_residual(lost, self.residual, was_prepared)

    def decode(self, received: Tensor) -> None:
        """Turn what was received, in place, into what it would be without compression."""
        if self._compression is not None:
            self._compression.add_reference(received, self.residual)

    def record_received(self, received: Tensor) -> None:
        """Let the compression update its reference with the decoded result."""
        if self._compression is not None:
            self._compression.update_reference(received, self.residual)

    def update(self, received: Tensor, next_message: Tensor | None) -> Tensor:
        """Compute the result of a round from what the exchange has brought for this chunk.

        ``next_message`` is that of the next round, if it is sent at the same time.
        """
        if next_message is None:
            return self._algorithm.update(self.message, received, self.state)
        result = self._algorithm.on_send(next_message, (self.message, received), self.state)
        assert result is not None
        return result

    def local_start(self, result: Tensor) -> Tensor:
        """The parameters from which local steps go on, given the result of a round."""
        if self._compression is None:
            return result
        return self._compression.local_params(result, self.residual, out=self.scratch)


class Bucket:
    """Chunks that travel in one collective: in ``wire``, behind the first one with the statuses."""

    def __init__(self, wire: Tensor, chunks: list[BucketChunk]) -> None:
        self.wire = wire
        self.chunks = chunks
        self._lengths = [len(chunk) for chunk in chunks]
        self._length = sum(self._lengths)

    def __len__(self) -> int:
        return self._length

    @property
    def message(self) -> Tensor:
        """The memory of the message alone, of shape ``(len(self),)``."""
        return self.wire[: self._length]

    @property
    def slices(self) -> list[range]:
        """Which elements of the flat vector it holds."""
        return [range(chunk.params.start, chunk.params.stop) for chunk in self.chunks]

    def keep_lost(self, lost: Tensor | None, was_prepared: bool) -> None:
        """Let each chunk keep its slice of what was lost, if that is fed back."""
        for chunk, part in self.split(lost) if lost is not None else ():
            chunk.keep_lost(part, was_prepared)

    def split(self, received: Tensor, weight: float = 1.0) -> Iterator[tuple[BucketChunk, Tensor]]:
        """Yield each chunk with its slice of what was received, ``(len(self),)`` or longer.

        Sums are divided by the total ``weight``, in place.
        """
        parts = torch.split_with_sizes(received[: self._length], self._lengths)
        for chunk, part in zip(self.chunks, parts, strict=True):
            yield chunk, part if weight == 1 else part.div_(weight)


def slice_state(state: State, numel: int, params: Chunk) -> State:
    """The state of a chunk: slices of entries of shape ``(numel,)``, copies of all others."""
    sliced: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            is_cut = value.shape == (numel,)
            value = value[params.start : params.stop] if is_cut else value.clone()
        sliced[key] = value
    return sliced


def group_chunks(chunks: list[Chunk], longest: int) -> list[list[Chunk]]:
    """Group neighbouring chunks, up to ``longest`` elements unless one chunk is longer."""
    groups: list[list[Chunk]] = []
    length = 0
    for chunk in chunks:
        if not groups or length + len(chunk) > longest:
            groups.append([])
            length = 0
        groups[-1].append(chunk)
        length += len(chunk)
    return groups
