"""Where a worker is in its data and its random numbers, to go on exactly there."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.random_states import random_states, set_random_states

Place = Literal["batch end", "validation end", "next batch", "next epoch", "stopped"]
"""What was done last: a batch, or its validation too, or all that comes before the next batch, or
the whole epoch. ``"stopped"`` is the end of a run within an epoch."""


class Position(NamedTuple):
    """What a worker takes up right before its first resumed batch.

    Attributes:
        place: Where in the loops it is.
        random: States of the random number generators; None to leave them as they are.
        has_validation_data: Whether the loaders of validation had been made.
        is_dealt: Whether a sampler deals the training data out among the workers.
    """

    place: Place
    random: dict[str, Any] | None
    has_validation_data: bool
    is_dealt: bool = False

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Position:
        """Where the run is now."""
        has_validation_data = trainer.val_dataloaders is not None
        return cls(_place(trainer), random_states(), has_validation_data, deals_out(trainer))

    def enter(self, loops: dict[str, Any]) -> None:
        """Set counters that Lightning would take for another place.

        Left alone, it skips the validation and the end of an epoch whose last batch was saved, and
        decides by the counters of the next epoch whether to draw the random numbers for them.

        Args:
            loops: Of a checkpoint, before Lightning reads them.
        """
        fit = loops["fit_loop"]
        batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
        if self.place == "batch end":
            for counts in (batches["current"], batches["total"]):
                counts["completed"] = counts["processed"]
        elif self.place == "next epoch":
            batches["is_last_batch"] = False
            batches["current"] = dict.fromkeys(batches["current"], 0)
            for counts in (epochs["current"], epochs["total"]):
                counts.update(dict.fromkeys(counts, counts["processed"]))

    def restore(self, trainer: pl.Trainer) -> None:
        """Take it up; the loops have been restored by Lightning."""
        if self.has_validation_data:
            lightning_private.load_validation_data(trainer)
        if self.random is not None:
            set_random_states(self.random)
        if self.place == "next epoch" and trainer.current_epoch > 0:
            lightning_private.start_epoch_data(trainer)
        if self.place != "stopped":
            lightning_private.skip_to(trainer, self.place)


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders of the training data, as far as they have been made."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def deals_out(trainer: pl.Trainer) -> bool:
    """Whether samplers deal all training data out among the workers."""
    loaders = train_loaders(trainer)
    samplers = [lightning_private.sampler_of(o) for o in loaders if isinstance(o, DataLoader)]
    is_dealt = [isinstance(sampler, DistributedSampler) for sampler in samplers]
    return bool(is_dealt) and len(is_dealt) == len(loaders) and all(is_dealt)


def _place(trainer: pl.Trainer) -> Place:
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    batches: Any = loop.epoch_loop.batch_progress
    if epochs.started < epochs.ready:
        return "next epoch"
    if epochs.processed == epochs.ready:
        return "next epoch" if batches.is_last_batch or not epochs.ready else "stopped"
    if batches.current.completed < batches.current.processed:
        return "batch end"
    if trainer.validating:
        validated = loop.epoch_loop.val_loop.batch_progress.current
        is_over = 0 < validated.completed == validated.ready
        return "validation end" if is_over and not trainer.interrupted else "batch end"
    return "validation end" if batches.is_last_batch else "next batch"
