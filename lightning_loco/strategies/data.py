"""Workers of different pace: their share of the data and of ``max_steps``; the shortest run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.schedules import Schedule
from lightning_loco.strategies import lightning_compat


def share_data(dataloader: object, shares: list[int], worker: int) -> object:
    """Deal the training data out in proportion.

    Args:
        dataloader: With the even sampler that Lightning puts in; others are left as they are.
        shares: One positive integer per worker.
        worker: This worker.
    """
    if len(set(shares)) > 1 and isinstance(dataloader, DataLoader):
        even = lightning_compat.sampler_of(dataloader)
        if isinstance(even, DistributedSampler):
            return lightning_compat.with_sampler(dataloader, ShareSampler(even, shares, worker))
    return dataloader


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


class Pace:
    """``max_steps`` counts the local steps of the worker that makes most of them per round.

    Args:
        trainer: Whose limit is lowered on the other workers, until :meth:`restore`.
        schedule: Of the run.
        worker: This worker.
        num_workers: Number of workers N.
    """

    def __init__(
        self, trainer: pl.Trainer, schedule: Schedule, worker: int, num_workers: int
    ) -> None:
        self._schedule = schedule
        self._worker = worker
        self._loop = trainer.fit_loop.epoch_loop
        self._max_steps = self._loop.max_steps
        shares = schedule.shares(num_workers)
        if self._max_steps > 0:
            self._loop.max_steps = self._max_steps * shares[worker] // max(shares)
        self._own_max_steps = self._loop.max_steps

    def restore(self) -> None:
        """Give the Trainer its limit back."""
        self._loop.max_steps = self._max_steps

    def check_length(self, trainer: pl.Trainer) -> None:
        """Refuse a run that is over before a result that comes one round late.

        A run whose length is not known is not refused, and neither are ``fast_dev_run`` and the
        short runs of a search for the learning rate.

        Args:
            trainer: Right before its first step.

        Raises:
            ValueError: If there is room for a single round.
        """
        sync_every = self._schedule.sync_every_of(self._worker)
        shortest = self._schedule.shortest_run(self._worker)
        is_search = trainer.max_steps != self._own_max_steps
        is_trial = trainer.fast_dev_run or is_search  # type: ignore[attr-defined]
        if is_trial:
            return
        steps = trainer.estimated_stepping_batches
        if 0 <= steps < shortest:
            raise ValueError(
                f"The result of a round comes one round later, but this run of {steps:.0f} local "
                f"steps has room for a single round of sync_every={sync_every}. Use sync_every of "
                f"at most {steps // 2:.0f}, or a method whose results come at once, such as DiLoCo."
            )
