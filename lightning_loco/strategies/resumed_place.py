"""Where a worker goes on in its data, also when another number of workers had come so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.positions import Position, deals_out, train_loaders


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
        lightning_private.go_on_in_data(trainer)
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
            lightning_private.start_epoch_data(trainer)

    def _deal_out(self, trainer: pl.Trainer) -> list[str]:
        lightning_private.start_epoch_data(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        length = int(trainer.num_training_batches)
        count = length
        if not progress.is_last_batch:
            count = min(self._rescaled(progress.current.ready), length - 1)
            count -= count % trainer.accumulate_grad_batches
            lightning_private.leave_out_batches(trainer, count)
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
