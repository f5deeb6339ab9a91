"""Members that come and go under Lightning: when a job joins, its data, and where its loops are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.elastic.data_stream import MembersSampler
from lightning_loco.engine.membership import DataShare
from lightning_loco.parameter_server.step_request import read_hyperparameters, write_hyperparameters
from lightning_loco.strategies import lightning_compat


class JoiningLoader:
    """A data loader that is read only by a job that has joined: its samples depend on the others.

    Args:
        loader: Reads this member's samples.
        join: Joins, if that is still to be done.
    """

    def __init__(self, loader: DataLoader[Any], join: Callable[[], None]) -> None:
        self.loader = loader
        self._join = join

    def __len__(self) -> int:
        """Batches of one walk over the data."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches; the first one is read after joining."""
        self._join()
        yield from self.loader


def share_among_members(
    dataloader: object, share: DataShare, parts: int, join: Callable[[], None]
) -> object:
    """Give a job its part of the training data, whoever the other members are.

    Args:
        dataloader: With the sampler that Lightning puts in; others are left as they are.
        share: Of this member.
        parts: How many epochs make up the data.
        join: Joins, if that is still to be done.
    """
    if isinstance(dataloader, DataLoader):
        even = lightning_compat.sampler_of(dataloader)
        if isinstance(even, DistributedSampler):
            data = cast(Sized, even.dataset)
            sampler = MembersSampler(data, share, parts, shuffle=even.shuffle, seed=even.seed)
            return JoiningLoader(lightning_compat.with_sampler(dataloader, sampler), join)
    rank_zero_warn(
        "The members of this run cannot share data that are not read by index with a sampler of "
        "Lightning's: every member reads all of them, unless the data see to that themselves. Use "
        "elastic.MembersSampler with engine.link.share."
    )
    return dataloader


class TrainerPosition:
    """Where a trainer is, for newcomers: learning rates, their schedules, and the logged step.

    Args:
        trainer: Whose position it is.
        steps: Local steps of this worker.
    """

    def __init__(self, trainer: pl.Trainer, steps: Callable[[], int]) -> None:
        self._trainer = trainer
        self._steps = steps
        self._is_warned = False

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._trainer.optimizers for group in one.param_groups]

    @property
    def _total_steps(self) -> int | None:
        """How many local steps the whole fit makes; None if nobody knows."""
        if any(isinstance(c, GradientAccumulationScheduler) for c in self._trainer.callbacks):  # type: ignore[attr-defined]
            return None  # the estimate is by the present accumulation
        total = self._trainer.estimated_stepping_batches
        return int(total) if 0 <= total < math.inf else None

    def read(self) -> dict[str, Any]:
        """The present position."""
        return {
            "logged_step": lightning_compat.logged_step(self._trainer),
            "total_steps": self._total_steps,
            "groups": read_hyperparameters(self._groups),
            "schedulers": [
                _plain(config.scheduler.state_dict())
                for config in self._trainer.lr_scheduler_configs
            ],
        }

    def go_on(self, position: Any, who: str) -> None:
        """Go on from the position of another member; a warning if it makes more or fewer steps.

        Args:
            position: Of that member.
            who: That member.

        Raises:
            RuntimeError: If its optimizers or schedulers are others.
        """
        groups, configs = self._groups, self._trainer.lr_scheduler_configs
        found = position["groups"]
        if len(found) != len(groups) or len(position["schedulers"]) != len(configs):
            raise RuntimeError(
                f"This worker has {len(groups)} parameter groups and {len(configs)} schedulers, "
                f"the run {len(found)} and {len(position['schedulers'])}. Start it with the same "
                "configure_optimizers."
            )
        own, theirs = self._total_steps, position["total_steps"]
        if own != theirs and not self._is_warned:
            self._is_warned = True
            rank_zero_warn(
                f"{who} makes {theirs or 'an unknown number of'} local steps in all, and this "
                f"worker {own or 'an unknown number'}. The one that ends first leaves the others "
                "to go on with other weights. Give all jobs the same max_steps, or the same data "
                "and max_epochs."
            )
        for config, saved in zip(configs, position["schedulers"], strict=True):
            config.scheduler.load_state_dict({**config.scheduler.state_dict(), **saved})
        write_hyperparameters(groups, found)
        lightning_compat.set_logged_step(self._trainer, position["logged_step"])

    def count(self) -> None:
        """Count as many steps as this worker."""
        loop, steps = self._trainer.fit_loop.epoch_loop, self._steps()
        automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = loop.manual_optimization.optim_step_progress.total
        automatic.ready = automatic.completed = manual.ready = manual.completed = steps

    def end_step(self) -> None:
        """Let the schedulers step that do so after every so many steps of the optimizer."""
        lightning_compat.set_logged_step(
            self._trainer, lightning_compat.logged_step(self._trainer) + 1
        )
        for config in self._trainer.lr_scheduler_configs:
            is_due = config.interval == "step" and self._steps() % config.frequency == 0
            if is_due and not config.reduce_on_plateau:
                config.scheduler.step()  # type: ignore[call-arg]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Those entries that are numbers, texts, or lists of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
