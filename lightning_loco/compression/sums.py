"""The sum of what all workers have written, shard by shard.

A *shard* is the part of a message that one worker adds up for all: whole blocks, about an N-th. It
receives the others' bytes of its shard, adds the values up, and writes the sum; the bytes of all
sums are the same everywhere, and so are the values that are read. Sums of sparse messages would not
be sparse: there everyone adds up everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression.base import Codec


class Shard(NamedTuple):
    """A worker's part of a message.

    Attributes:
        values: Its elements.
        wire: Their bytes.
    """

    values: slice
    wire: slice


def shards(codec: Codec, numel: int, num_workers: int) -> list[Shard]:
    """One for each worker, in order; together they are the message, each element once.

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


def add_up(codec: Codec, wires: Sequence[Tensor], total: Tensor) -> Tensor:
    """The sum of what several workers have written, in their order.

    Args:
        codec: What they have used.
        wires: The bytes of each, for the same elements.
        total: Where to; flat.
    """
    first, *others = wires
    codec.decode(first, total)
    for part, written in codec.pieces(total) if others else ():
        read = torch.empty_like(total[part])
        for wire in others:
            total[part].add_(codec.decode(wire[written], read))
    return total


def add_written(codec: Codec, wire: Tensor, total: Tensor) -> Tensor:
    """Add to ``total`` what bytes in ``wire`` tell."""
    for part, written in codec.pieces(total):
        total[part].add_(codec.decode(wire[written], torch.empty_like(total[part])))
    return total


def subtract_written(codec: Codec, wire: Tensor, values: Tensor) -> None:
    """Leave in ``values`` what their bytes in ``wire`` do not tell of them."""
    for part, written in codec.pieces(values):
        values[part].sub_(codec.decode(wire[written], torch.empty_like(values[part])))
