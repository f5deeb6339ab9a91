"""Elastic members under Lightning: when a job joins the run, its data, and its loop position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.data_stream import MembersSampler
from lightning_loco.parameter_server.optimizer_state import (
    read_hyperparameters,
    write_hyperparameters,
)
from lightning_loco.strategies import lightning_compat


class JoiningLoader:
    """A data loader that joins the run before its first batch: samples depend on the members."""

    def __init__(self, loader: DataLoader[Any], join: Callable[[], None]) -> None:
        self.loader = loader
        self._join = join

    def __len__(self) -> int:
        """Number of batches in one iteration."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Join the run, then yield the batches."""
        self._join()
        yield from self.loader


def shard_dataloader(
    dataloader: object, shard: DataShard, parts: int, join: Callable[[], None]
) -> object:
    """Return a data loader that reads this rank's part of the training data.

    One without Lightning's distributed sampler is returned unchanged, with a warning. ``parts``
    epochs by one reader read the data once; ``join`` does nothing if this job has joined already.
    """
    if isinstance(dataloader, DataLoader):
        default = lightning_compat.sampler_of(dataloader)
        if isinstance(default, DistributedSampler):
            data = cast(Sized, default.dataset)
            sampler = MembersSampler(data, shard, parts, shuffle=default.shuffle, seed=default.seed)
            return JoiningLoader(lightning_compat.with_sampler(dataloader, sampler), join)
    rank_zero_warn(
        "The members of this run can only share data that are read by index with Lightning's own "
        "sampler. Every member reads all of these data, unless they divide themselves. Use "
        "elastic.data_stream.MembersSampler with engine.exchange.data_shard."
    )
    return dataloader


class TrainerPosition:
    """The loop position of a trainer: learning rates, their schedules, and the logged step.

    Implements :class:`lightning_loco.elastic.member_connection.LoopPosition`; ``steps`` returns the
    local steps of this worker.
    """

    def __init__(self, trainer: pl.Trainer, steps: Callable[[], int]) -> None:
        self._trainer = trainer
        self._steps = steps
        self._earlier_steps = 0
        self._has_warned = False

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optim in self._trainer.optimizers for group in optim.param_groups]

    @property
    def _total_steps(self) -> int | None:
        """Number of local steps in the whole fit; None if it is unknown."""
        if any(isinstance(c, GradientAccumulationScheduler) for c in self._trainer.callbacks):  # type: ignore[attr-defined]
            return None  # the estimate assumes the current accumulation
        total = self._trainer.estimated_stepping_batches
        return int(total) if 0 <= total < math.inf else None

    def read(self) -> dict[str, Any]:
        """Return the current position."""
        return {
            "earlier_steps": self._trainer.global_step - self._steps(),
            "logged_step": lightning_compat.logged_step(self._trainer),
            "total_steps": self._total_steps,
            "groups": read_hyperparameters(self._groups),
            "schedulers": [
                _plain(config.scheduler.state_dict())
                for config in self._trainer.lr_scheduler_configs
            ],
        }

    def resume_from(self, position: Any, member: str) -> None:
        """Continue at the position that :meth:`read` has returned on another member.

        Warns if that member trains for more or fewer local steps than this one. RuntimeError if it
        has another number of parameter groups or schedulers.
        """
        groups, configs = self._groups, self._trainer.lr_scheduler_configs
        saved_groups, saved_schedulers = position["groups"], position["schedulers"]
        if len(saved_groups) != len(groups) or len(saved_schedulers) != len(configs):
            raise RuntimeError(
                f"This worker has {len(groups)} parameter groups and {len(configs)} schedulers, "
                f"the run {len(saved_groups)} and {len(saved_schedulers)}. Start it with the same "
                "configure_optimizers."
            )
        own, theirs = self._total_steps, position["total_steps"]
        if own != theirs and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{member} takes {theirs or 'an unknown number of'} local steps in all, and this "
                f"worker {own or 'an unknown number'}. The others continue after the first one has "
                "finished, and end with other weights. Give all jobs the same max_steps, or the "
                "same data and max_epochs."
            )
        for config, saved in zip(configs, saved_schedulers, strict=True):
            config.scheduler.load_state_dict({**config.scheduler.state_dict(), **saved})
        write_hyperparameters(groups, saved_groups)
        self._earlier_steps = position["earlier_steps"]
        lightning_compat.set_logged_step(self._trainer, position["logged_step"])

    def finish_step(self) -> None:
        """Advance the logged step and the schedulers that step with the optimizer."""
        lightning_compat.set_logged_step(
            self._trainer, lightning_compat.logged_step(self._trainer) + 1
        )
        for config in self._trainer.lr_scheduler_configs:
            is_due = config.interval == "step" and self._steps() % config.frequency == 0
            if is_due and not config.reduce_on_plateau:
                config.scheduler.step()  # type: ignore[call-arg]

    def count_steps(self) -> None:
        """Set the step counts of the trainer's loops to the run's.

        These include steps before the first one of the engine, of a checkpoint of plain Lightning.
        """
        loop, steps = self._trainer.fit_loop.epoch_loop, self._earlier_steps + self._steps()
        automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = loop.manual_optimization.optim_step_progress.total
        automatic.ready = automatic.completed = manual.ready = manual.completed = steps


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are numbers, strings, or lists of these."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
