"""Samples of an endless stream, which is dealt out anew when the members change."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from lightning_loco.engine.membership import DataShare


class MembersSampler(Sampler[int]):
    """Indices of this member's samples: epoch after epoch, each in an order of its own.

    One walk over it gives ``len(data) // parts`` of them, however many members there are, so that
    it is as long for all; the next one goes on where this one has ended. With N members all
    samples are seen once in ``parts / N`` walks, but for those that nobody takes when members come
    or go: at most what all take in two rounds.

    Args:
        data: Anything with a length.
        share: Of this member.
        parts: How many walks make up the data: the least number of members, say.
        shuffle: Whether every epoch has another order.
        seed: Of the order; equal on all members.

    Raises:
        ValueError: If there is nothing to draw from.
    """

    def __init__(
        self, data: Sized, share: DataShare, parts: int = 1, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if not len(data):
            raise ValueError("The data are empty.")
        self._size = len(data)
        self._share = share
        share.add_data(self._size)
        self._length = max(1, len(data) // parts)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch, self._order = -1, torch.zeros(0)

    def __len__(self) -> int:
        """Samples of one walk."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Walk on."""
        for _ in range(self._length):
            yield self._index(self._share.take())

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._size, generator=generator)
        return int(self._order[place])
