"""Sums and means of encoded messages, shard by shard.

A *shard* is the part of a message that one worker adds up for all: whole blocks, about an N-th of
the message. The worker receives the others' bytes of its shard, adds the values up, and encodes the
sum. All workers receive the same bytes of each sum and so decode the same values. A sum of sparse
messages would not be sparse, so there every worker adds up the whole messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression.codec import Codec


class Shard(NamedTuple):
    """The part of a message that one worker adds up.

    Attributes:
        values: The slice of the elements.
        wire: The slice of their bytes.
    """

    values: slice
    wire: slice


def shards(codec: Codec, numel: int, num_workers: int) -> list[Shard]:
    """Divide a message of ``numel`` elements into one shard per worker, in order.

    Example:
        >>> from lightning_loco.compression import Int8
        >>> [shard.values for shard in shards(Int8(block=4), 10, 2)]
        [slice(0, 4, None), slice(4, 10, None)]
    """
    blocks = codec.num_blocks(numel)
    borders = [blocks * worker // num_workers for worker in range(num_workers + 1)]
    return [
        Shard(
            slice(begin * codec.block, min(end * codec.block, numel)),
            slice(begin * codec.row_bytes, end * codec.row_bytes),
        )
        for begin, end in zip(borders, borders[1:], strict=False)
    ]


def add_up(
    codec: Codec, wires: Sequence[Tensor], total: Tensor, weights: Sequence[float]
) -> Tensor:
    """Decode the bytes of several workers for the same elements, and add them up in ``total``.

    The values of each worker are multiplied by its weight.
    """
    first, *others = zip(wires, weights, strict=True)
    codec.decode(first[0], total)
    if first[1] != 1:
        total.mul_(first[1])
    for part, written in codec.pieces(total) if others else ():
        read = torch.empty_like(total[part])
        for wire, weight in others:
            total[part].add_(codec.decode(wire[written], read), alpha=weight)
    return total


def average_senders(
    codec: Codec, wires: Sequence[Tensor], mean: Tensor, weights: Sequence[float]
) -> Tensor:
    """Decode the messages of all workers, and average each value over those that have sent it.

    A value that is 0 counts as not sent; one that no worker has sent is 0. The mean is weighted.

    Example:
        >>> import torch
        >>> from lightning_loco.compression import Sparse
        >>> codec = Sparse(k=4, block=8)
        >>> first = codec.encode(torch.tensor([4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0]))
        >>> second = codec.encode(torch.tensor([2.0, 2.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0]))
        >>> average_senders(codec, [first, second], torch.empty(8), (1, 1))
        tensor([3., 3., 4., 4., 2., 2., 0., 0.])
    """
    for part, written in codec.pieces(mean):
        total = codec.decode(wires[0][written], mean[part])
        count = (total != 0).to(total.dtype)
        if weights[0] != 1:
            count.mul_(weights[0])
            total.mul_(weights[0])
        for wire, weight in zip(wires[1:], weights[1:], strict=True):
            read = codec.decode(wire[written], torch.empty_like(total))
            total.add_(read, alpha=weight)
            count.add_(read != 0, alpha=weight)
        total.div_(count.masked_fill_(count == 0, 1))
    return mean


def add_written(codec: Codec, wire: Tensor, total: Tensor) -> Tensor:
    """Decode ``wire`` and add the values to ``total``, in place."""
    for part, written in codec.pieces(total):
        total[part].add_(codec.decode(wire[written], torch.empty_like(total[part])))
    return total


def subtract_written(codec: Codec, wire: Tensor, values: Tensor) -> None:
    """Decode ``wire`` and subtract the values from ``values``, in place: the encoding error."""
    for part, written in codec.pieces(values):
        values[part].sub_(codec.decode(wire[written], torch.empty_like(values[part])))
