"""Loading that an interrupted run can take up again at the very next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader


class SeededShuffle(RandomSampler):
    """A shuffle which depends on the seed and the epoch alone, so that a resumed run can repeat it.

    With several workers Lightning puts a ``DistributedSampler`` in its place, which is alike.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the beginning of each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


class ResumableDataLoader(StatefulDataLoader):
    """A loader whose state brings a resumed run to the very next batch, in any epoch.

    Lightning asks for an iterator before it tells the sampler which epoch it is, and a stateful
    iterator draws its shuffle at once: a run resumed in its second epoch would repeat the order of
    the first. So the iterator here is made when its first batch is asked for. A used-up epoch has
    no state, since the next one starts afresh.

    The arguments are a torch loader's; Lightning passes them when it puts in its own sampler.
    """

    def __init__(
        self,
        dataset: Dataset[Tensor],
        *,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[int] | None = None,
        batch_sampler: Sampler[list[int]] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        with warnings.catch_warnings():
            # torchdata calls a function that newer torch deprecates.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(
                dataset,
                batch_size=batch_size,
                shuffle=shuffle,
                sampler=sampler,
                batch_sampler=batch_sampler,
                num_workers=num_workers,
                drop_last=drop_last,
                worker_init_fn=worker_init_fn,
            )
        self._num_batches = 0
        self._started = False

    def __iter__(self) -> Iterator[Tensor]:
        self._started = False
        if self.next_iter_state is None:
            self._num_batches = 0
        return self._batches()

    def _batches(self) -> Iterator[Tensor]:
        iterator = super().__iter__()
        self._started = True
        for batch in iterator:
            self._num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position within the epoch: numbers, None, and dictionaries of them."""
        if self._num_batches in (0, len(self)):
            return {}
        loader = super().state_dict() if self._started else self.next_iter_state
        return {"num_batches": self._num_batches, "loader": loader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the batch after which ``state_dict`` was called."""
        self._started = False
        self._num_batches = state_dict.get("num_batches", 0)
        super().load_state_dict(state_dict.get("loader", {}))
