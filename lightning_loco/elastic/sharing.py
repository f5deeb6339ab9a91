"""Which samples belong to a member: an endless stream, dealt out anew when the members change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from lightning_loco.rounds.membership import Share


class DataShare:
    """This member's positions in the stream of samples that all members share.

    Member i of N takes the positions ``base + k N + i``. When the members change, all begin at a
    new base beyond everything that anyone may have taken until then, so that no two members ever
    take the same position.

    Attributes:
        sizes: How many samples the data have that are read so; equal on all members.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sizes: list[int] = []
        self._base, self._place, self._count = 0, 0, 1
        self._taken = self._taken_before = self._taken_in_round = 0

    def add_data(self, size: int) -> None:
        """The stream is one of so many samples, epoch after epoch."""
        if size not in self.sizes:
            self.sizes.append(size)

    def take(self) -> int:
        """The next position of this member."""
        with self._lock:
            position = self._base + self._taken * self._count + self._place
            self._taken += 1
            return position

    def begin_round(self) -> None:
        """Learn from the round before how much is taken in one."""
        with self._lock:
            self._taken_in_round = max(self._taken - self._taken_before, self._taken_in_round)
            self._taken_before = self._taken

    @property
    def reach(self) -> int:
        """The first position that nobody reaches before the next round."""
        with self._lock:
            return self._base + self._count * (self._taken + self._taken_in_round + 1)

    def begin_at(self, position: int) -> None:
        """Go on from a position, when a run is resumed."""
        self.deal(position, 0, 1)

    def deal(self, base: int, place: int, count: int) -> None:
        """Go on from a new base, as one of so many members."""
        with self._lock:
            self._base, self._place, self._count = base, place, count
            self._taken = self._taken_before = 0


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
        self, data: Sized, share: Share, parts: int = 1, *, shuffle: bool = True, seed: int = 0
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
