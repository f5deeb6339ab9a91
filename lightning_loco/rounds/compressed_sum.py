"""The sum of compressed messages of all workers: two swaps of bytes, or one of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_loco.codecs import Compression
from lightning_loco.codecs.sums import add_up, shards, subtract_written

Swap = Callable[[dict[int, Tensor], dict[int, Tensor]], None]
"""Sends each worker its tensor, and fills the memory for what each has sent; an empty one does not
travel."""


class CompressedSum:
    """One message on its way to the sum of all.

    Args:
        compression: How it is written.
        message: Flat; left alone until :meth:`run`.
        worker: Number of this worker.
        num_workers: Number of workers N.
        memory: Where the sum is read to, if what is lost is fed back. Otherwise it takes the
            message's place.
    """

    def __init__(
        self,
        compression: Compression,
        message: Tensor,
        worker: int,
        num_workers: int,
        memory: Tensor | None = None,
    ) -> None:
        self._codec = compression.codec
        self._message = message
        self._worker = worker
        self._num_workers = num_workers
        self._has_feedback = compression.has_feedback
        self._memory = message if memory is None else memory
        self._wire = self._codec.encode(message)

    @property
    def num_bytes(self) -> int:
        """What this worker sends."""
        others, size = self._num_workers - 1, self._wire.numel()
        if self._codec.is_sparse:
            return others * size
        own = shards(self._codec, self._message.numel(), self._num_workers)[self._worker].wire
        length: int = own.stop - own.start
        return size - length + others * length

    def run(self, swap: Swap) -> Tensor:
        """Exchange; what is lost is left in the message's place, if it is fed back.

        Returns:
            The sum over all workers, equal on all of them.
        """
        return self._add_sparse(swap) if self._codec.is_sparse else self._add_shards(swap)

    def _others(self) -> list[int]:
        return [worker for worker in range(self._num_workers) if worker != self._worker]

    def _in_order(self, own: Tensor, inbox: dict[int, Tensor]) -> list[Tensor]:
        return [inbox.get(worker, own) for worker in range(self._num_workers)]

    def _add_sparse(self, swap: Swap) -> Tensor:
        wire = self._wire
        inbox = {worker: torch.empty_like(wire) for worker in self._others()}
        swap(dict.fromkeys(inbox, wire), inbox)
        if self._has_feedback:
            subtract_written(self._codec, wire, self._message)
        return add_up(self._codec, self._in_order(wire, inbox), self._memory)

    def _add_shards(self, swap: Swap) -> Tensor:
        codec, wire = self._codec, self._wire
        parts = shards(codec, self._message.numel(), self._num_workers)
        own = parts[self._worker]
        piece = wire[own.wire]
        inbox = {worker: torch.empty_like(piece) for worker in self._others()}
        swap({worker: wire[parts[worker].wire] for worker in inbox}, inbox)
        total = torch.empty_like(self._message[own.values])
        add_up(codec, self._in_order(piece, inbox), total)
        if self._has_feedback:
            subtract_written(codec, wire, self._message)
        sums = torch.empty_like(wire)
        codec.encode(total, sums[own.wire])
        places = {worker: sums[parts[worker].wire] for worker in inbox}
        swap(dict.fromkeys(inbox, sums[own.wire]), places)
        if self._has_feedback:
            subtract_written(codec, sums[own.wire], total)
            self._message[own.values].add_(total)
        return codec.decode(sums, self._memory)


def simulate_sum(compression: Compression, messages: Sequence[Tensor]) -> Tensor:
    """What every worker reads of the sum; what is lost, if it is fed back, is left in its message.

    Args:
        compression: How messages are written.
        messages: Of all workers, in order.
    """
    codec, total = compression.codec, torch.empty_like(messages[0])
    wires = [codec.encode(message) for message in messages]
    if compression.has_feedback:
        for wire, message in zip(wires, messages, strict=True):
            subtract_written(codec, wire, message)
    add_up(codec, wires, total)
    if codec.is_sparse:
        return total
    sums = codec.encode(total)
    if compression.has_feedback:
        subtract_written(codec, sums, total)
        parts = shards(codec, total.numel(), len(messages))
        for part, message in zip(parts, messages, strict=True):
            message[part.values].add_(total[part.values])
    return codec.decode(sums, total)
