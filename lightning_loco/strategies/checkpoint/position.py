"""Where a worker is in its data and its random numbers, and how another run goes on from there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_loco.strategies import lightning_compat

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
            lightning_compat.load_validation_data(trainer)
        if self.random is not None:
            set_random_states(self.random)
        if self.place == "next epoch" and trainer.current_epoch > 0:
            lightning_compat.start_epoch_data(trainer)
        if self.place != "stopped":
            lightning_compat.skip_to(trainer, self.place)


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders of the training data, as far as they have been made."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def deals_out(trainer: pl.Trainer) -> bool:
    """Whether samplers deal all training data out among the workers."""
    loaders = train_loaders(trainer)
    samplers = [lightning_compat.sampler_of(o) for o in loaders if isinstance(o, DataLoader)]
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


class ResumedPlace:
    """Takes up a position in the data that a worker has saved, perhaps one of other workers.

    Data that a sampler deals out among the workers have come as far as all of them together: the
    epoch is dealt out anew, and the batches that were trained on are read and left out. Data that
    each worker brings by itself go on where it was.

    Args:
        position: Where the worker was; where worker 0 was, if this one is new.
        before: In what proportion the workers that there were shared the data, one number each.
        now: In what proportion they share them now.
        worker: This worker.
    """

    def __init__(
        self, position: Position, before: Sequence[int], now: Sequence[int], worker: int
    ) -> None:
        self._position = position
        self._before = list(before)
        self._now = list(now)
        self._worker = worker
        self._loader_states: list[Any] = []

    def enter(self, loops: dict[str, Any]) -> None:
        """Prepare the counters of a checkpoint before Lightning reads them."""
        if self._before != self._now:
            self._loader_states = loops["fit_loop"]["state_dict"].pop("combined_loader", [])
        self._position.enter(loops)

    def restore(self, trainer: pl.Trainer, deals: bool = True) -> list[str]:
        """Take the position up, once Lightning has restored its loops.

        Args:
            trainer: Whose loops they are.
            deals: Whether data are to be dealt out anew; members that come and go do so themselves.

        Returns:
            What is begun anew, in words.
        """
        notes = []
        lightning_compat.go_on_in_data(trainer)
        if (
            deals
            and self._before != self._now
            and self._position.place not in ("next epoch", "stopped")
        ):
            # one worker has no sampler that deals out
            if deals_out(trainer) or (len(self._now) == 1 and self._position.is_dealt):
                notes = self._deal_out(trainer)
            else:
                self._load_states(trainer)
        self._position.restore(trainer)
        return notes

    def other_workers(self, own: str) -> list[str]:
        """What becomes of workers that are no more, or are new, in words.

        Args:
            own: What each worker has of its own, in words.
        """
        before, now = len(self._before), len(self._now)
        if now < before:
            return [f"{own} of {_span(now, before)} are dropped"]
        if now > before:
            return [
                f"new are {_span(before, now)}, with {own} of worker 0 and random numbers from "
                "their own seed"
            ]
        return []

    def numbers(self) -> tuple[str, str]:
        """How many workers there were and are, in words."""
        counts = len(self._before), len(self._now)
        before, now = ("1 worker" if count == 1 else f"{count} workers" for count in counts)
        return before, now

    def _load_states(self, trainer: pl.Trainer) -> None:
        loaders = [one for one in train_loaders(trainer) if hasattr(one, "load_state_dict")]
        for loader, state in zip(loaders, self._loader_states, strict=False):
            loader.load_state_dict(state)
        if loaders:
            lightning_compat.start_epoch_data(trainer)

    def _deal_out(self, trainer: pl.Trainer) -> list[str]:
        lightning_compat.start_epoch_data(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        length = int(trainer.num_training_batches)
        count = length
        if not progress.is_last_batch:
            count = min(self._rescaled(progress.current.ready), length - 1)
            count -= count % trainer.accumulate_grad_batches
            lightning_compat.leave_out_batches(trainer, count)
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, count)
        return [f"the data of the epoch are dealt out anew, from batch {count} of {length} on"]

    def _rescaled(self, batches: int) -> int:
        """How many batches each share comes to, if all together have come as far as before."""
        former = self._worker if self._worker < len(self._before) else 0
        own, all_of_before = self._before[former], sum(self._before)
        return batches * all_of_before * self._now[self._worker] // (own * sum(self._now))


def _span(first: int, end: int) -> str:
    return f"worker {first}" if end == first + 1 else f"workers {first} to {end - 1}"


def random_states() -> dict[str, Any]:
    """The states of all random number generators, as plain values and tensors.

    That of CUDA is among them only if this process uses CUDA already.
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put all random number generators where :func:`random_states` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
