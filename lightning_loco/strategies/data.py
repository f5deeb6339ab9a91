"""How ranks divide the training data, and workers the steps of a run, if their speeds differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.schedules import Schedule
from lightning_loco.strategies import lightning_compat


def share_data(dataloader: object, shares: list[int], rank: int) -> object:
    """Divide the training data in proportion to shares, one positive integer per rank.

    Other loaders than those with the even sampler that Lightning sets are returned unchanged.
    """
    if len(set(shares)) > 1 and isinstance(dataloader, DataLoader):
        even = lightning_compat.sampler_of(dataloader)
        if isinstance(even, DistributedSampler):
            return lightning_compat.with_sampler(dataloader, ShareSampler(even, shares, rank))
    return dataloader


class ShareSampler(DistributedSampler[Any]):
    """Gives each rank a part of the data in proportion to its share, disjoint from the others'.

    Args:
        sampler: The even sampler to replace; its dataset, seed and shuffling are kept.
        shares: One positive integer per rank, for instance the local steps per round.
        rank: This rank.

    Example:
        >>> even = DistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
        >>> [list(ShareSampler(even, [2, 1], rank)) for rank in (0, 1)]
        [[0, 1, 3, 4], [2, 5]]
    """

    def __init__(self, sampler: DistributedSampler[Any], shares: Sequence[int], rank: int) -> None:
        super().__init__(
            sampler.dataset,
            num_replicas=sum(shares),
            rank=0,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        self._first_column = sum(shares[:rank])
        self._num_columns = shares[rank]
        self._num_rows = self.num_samples

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's part of the present epoch.

        The epoch is a table with as many columns as all shares together; column c holds what the
        even sampler gives to rank c. This rank reads its columns row by row.
        """
        columns = []
        for column in range(self._first_column, self._first_column + self._num_columns):
            self.rank = column
            columns.append(list(super().__iter__()))
        return iter([index for row in zip(*columns, strict=True) for index in row])

    def __len__(self) -> int:
        """Number of samples of this rank."""
        return self._num_rows * self._num_columns


class MaxSteps:
    """Sets the Trainer's ``max_steps`` of workers that take fewer local steps per round.

    ``max_steps`` of the user counts the local steps of the worker that takes most of them; the
    others get a limit in proportion to their share, until :meth:`restore`.
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
        """Restore the limit that the user has set."""
        self._loop.max_steps = self._max_steps

    def check_length(self, trainer: pl.Trainer) -> None:
        """Raise ValueError for a run that ends before the result of a pending round is applied.

        A run whose length is not known is not refused, and neither are ``fast_dev_run`` and the
        short runs of a learning rate finder.
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
                f"sync_every={sync_every}: the result of a round is applied one round later, after "
                f"the end of this run of {steps:.0f} local steps. Use sync_every of at most "
                f"{steps // 2:.0f}, or a method whose results are applied at once, such as DiLoCo."
            )


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of the training data; empty if they have not been made yet."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def is_distributed(trainer: pl.Trainer) -> bool:
    """Return whether samplers divide all training data among the ranks."""
    loaders = train_loaders(trainer)
    samplers = [lightning_compat.sampler_of(o) for o in loaders if isinstance(o, DataLoader)]
    flags = [isinstance(sampler, DistributedSampler) for sampler in samplers]
    return bool(flags) and len(flags) == len(loaders) and all(flags)


def samples_of(trainer: pl.Trainer) -> list[list[int | None]] | None:
    """Return for each training loader the number of its samples, and the seed of its order.

    Each is None where it is not known, or does not decide the order. None for all if the data are
    made again every few epochs, which may change them.
    """
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        return None
    found: list[list[int | None]] = []
    for loader in train_loaders(trainer):
        sampler = lightning_compat.sampler_of(loader) if isinstance(loader, DataLoader) else None
        seed = sampler.seed if isinstance(sampler, DistributedSampler) and sampler.shuffle else None
        found.append([sized_len(getattr(loader, "dataset", None)), seed])
    return found


def samples_read(
    trainer: pl.Trainer, shares: Sequence[int], rank: int, is_epoch_over: bool
) -> int | None:
    """Return how many samples all ranks together have read, counted over the epochs.

    ``shares`` are in what proportion the ranks share the data, as in :class:`ShareSampler`. The
    samplers must divide all data, as :func:`is_distributed` says. None if there are several
    loaders, or one without a batch size. If ``is_epoch_over``, the present epoch has no more
    batches.
    """
    loaders = train_loaders(trainer)
    if len(loaders) != 1:
        return None
    (loader,) = loaders
    sampler = lightning_compat.sampler_of(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    assert isinstance(sampler, DistributedSampler)
    if batch_size is None:
        return None
    size, loop = len(cast(Sized, sampler.dataset)), trainer.fit_loop
    batches = 0 if is_epoch_over else loop.epoch_loop.batch_progress.current.ready
    taken = min(batches * batch_size * sum(shares) // shares[rank], size)
    epochs: Any = loop.epoch_progress.current
    return int(epochs.processed) * size + taken
