"""The demo's loader, with which a run resumes at any batch; it needs torchdata."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader


class ResumableDataLoader(StatefulDataLoader):
    """A loader with whose state a run resumes at the next batch, in any epoch.

    Lightning makes an iterator before it sets the epoch of the sampler, and a stateful iterator
    draws its shuffle at once: a run resumed in its second epoch would repeat the order of the
    first. So this iterator is made when its first batch is read. After the last batch of an epoch
    there is no state, because the next epoch starts at its first batch.

    The arguments are as in torch's loader; Lightning passes them when it sets its own sampler.
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
        """Return the position within the epoch: numbers, None, and dictionaries of them."""
        if self._num_batches in (0, len(self)):
            return {}
        loader = super().state_dict() if self._started else self.next_iter_state
        return {"num_batches": self._num_batches, "loader": loader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch at which ``state_dict`` was called."""
        self._started = False
        self._num_batches = state_dict.get("num_batches", 0)
        super().load_state_dict(state_dict.get("loader", {}))
