"""Sampler of the stream of samples that all members share."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from lightning_loco.elastic.data_shard import DataShard


class MembersSampler(Sampler[int]):
    """Indices of this rank's samples: epoch after epoch, each in its own random order.

    One iteration yields ``len(data) // parts`` indices, whatever the number of members, so that it
    is equally long for all of them; the next iteration continues where it ended. ``N`` readers see
    all samples once in ``parts / N`` iterations, except for those that are skipped when members
    join or leave: at most as many as all members use in two rounds.

    Args:
        data: Any data set with a length.
        shard: This member's part of the stream.
        parts: Number of iterations by one reader that read the data once; usually the least number
            of members, times their readers.
        shuffle: Whether every epoch has another order.
        seed: Seed of the order; equal on all members.

    Raises:
        ValueError: If the data set is empty.
    """

    def __init__(
        self, data: Sized, shard: DataShard, parts: int = 1, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if not len(data):
            raise ValueError("The data are empty.")
        self._size = len(data)
        self._shard = shard
        shard.add_dataset(self._size)
        self._length = max(1, len(data) // parts)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch, self._order = -1, torch.zeros(0, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        """Number of samples in one iteration."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Yield the next ``len(self)`` indices of this member."""
        for _ in range(self._length):
            yield self._index_at(self._shard.next_position())

    def _index_at(self, position: int) -> int:
        epoch, offset = divmod(position, self._size)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            # On all members the same order, whatever the default device and its generator are.
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = torch.randperm(self._size, generator=generator, device="cpu")
            self._epoch = epoch
        return int(self._order[offset])
