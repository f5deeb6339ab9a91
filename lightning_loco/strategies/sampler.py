"""Sharing a dataset among workers of different speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DistributedSampler


class ShareSampler(DistributedSampler[Any]):
    """Give each worker a part of the data in proportion to its share, disjoint from the others'.

    Args:
        sampler: The even sampler to stand in for; its dataset, seed and shuffling are kept.
        shares: One positive integer per worker, for instance its local steps per round.
        worker: This worker.

    Example:
        >>> even = DistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
        >>> [list(ShareSampler(even, [2, 1], worker)) for worker in (0, 1)]
        [[0, 1, 3, 4], [2, 5]]
    """

    def __init__(
        self, sampler: DistributedSampler[Any], shares: Sequence[int], worker: int
    ) -> None:
        super().__init__(
            sampler.dataset,
            num_replicas=sum(shares),
            rank=0,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        self._first = sum(shares[:worker])
        self._share = shares[worker]
        self._rows = self.num_samples

    def __iter__(self) -> Iterator[Any]:
        """Walk over this worker's part of the present epoch."""
        lanes = []
        for lane in range(self._first, self._first + self._share):
            self.rank = lane
            lanes.append(list(super().__iter__()))
        return iter([index for row in zip(*lanes, strict=True) for index in row])

    def __len__(self) -> int:
        """Number of samples of this worker."""
        return self._rows * self._share
