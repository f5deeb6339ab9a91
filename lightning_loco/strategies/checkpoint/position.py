"""Where a rank is in its loops, data and random numbers, and how another run resumes there."""

from __future__ import annotations

import random
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.data import is_distributed, samples_of, train_loaders

Phase = Literal["batch end", "validation end", "next batch", "next epoch", "stopped"]
"""What was done last: a batch, its validation, everything before the next batch, or the whole
epoch. ``"stopped"`` is the end of a run within an epoch."""


class Position(NamedTuple):
    """The position of a rank right before its first resumed batch.

    Attributes:
        phase: What the loops have done last.
        random: States of the random number generators; None to leave them unchanged.
        has_validation_data: Whether the validation loaders had been made.
        is_distributed: Whether a sampler divides the training data among the ranks.
        data_epochs: When loaders were made, see ``lightning_compat.epochs_of_data``.
        samples: What the loaders read, as :func:`~lightning_loco.strategies.data.samples_of`.
    """

    phase: Phase
    random: dict[str, Any] | None
    has_validation_data: bool
    is_distributed: bool
    data_epochs: dict[str, float] | None
    samples: list[list[int | None]] | None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Position:
        """Return the present position of a run."""
        return cls(
            _phase(trainer),
            random_states(),
            trainer.val_dataloaders is not None,
            is_distributed(trainer),
            lightning_compat.epochs_of_data(trainer),
            samples_of(trainer),
        )

    def prepare_loops(self, loops: dict[str, Any], trainer: pl.Trainer) -> None:
        """Change counters of a checkpoint from which Lightning would derive another position.

        Unchanged, Lightning skips the validation and the end of an epoch whose last batch was
        saved, and decides by the counters of the next epoch whether to draw random numbers for it.
        """
        if self.data_epochs is not None:
            lightning_compat.make_data_as_in(trainer, self.data_epochs)
        fit = loops["fit_loop"]
        batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
        if self.phase == "batch end":
            for counts in (batches["current"], batches["total"]):
                counts["completed"] = counts["processed"]
        elif self.phase == "next epoch":
            batches["is_last_batch"] = False
            batches["current"] = dict.fromkeys(batches["current"], 0)
            for counts in (epochs["current"], epochs["total"]):
                counts.update(dict.fromkeys(counts, counts["processed"]))

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the position, after Lightning has restored the loops."""
        if self.has_validation_data:
            lightning_compat.load_validation_data(trainer)
        # After the validation loaders, which draw random numbers when they are made.
        if self.random is not None:
            set_random_states(self.random)
        if self.phase == "next epoch" and trainer.current_epoch > 0:
            lightning_compat.start_epoch_data(trainer)
        if self.phase != "stopped":
            lightning_compat.resume_loop_at(trainer, self.phase)


def _phase(trainer: pl.Trainer) -> Phase:
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


# ----------------------------------------------------- the ranks of a worker of several

OTHER_RANKS = "other_ranks"
"""Entry of a side file with the states of all ranks of the worker but the first, in order."""

READERS = "readers"
"""Entry of such a file with the number of ranks of the worker that read different data."""


class RankState(NamedTuple):
    """The state of one rank that the other ranks of its worker do not have.

    Attributes:
        position: Where it is in its data, and its random states.
        loops: Lightning's loops, with the states of the loaders.
        statistics: What its communication has cost.
    """

    position: dict[str, Any]
    loops: dict[str, Any]
    statistics: dict[str, Any]


def take_rank_state(own: dict[str, Any], place: int) -> int:
    """Replace the state of the first rank in the content of a side file by the state of another.

    A rank that the worker did not have keeps the state of the first one. Returns how many ranks the
    worker had; TypeError if a state was not written by this package.
    """
    others = [RankState(**entry) for entry in own.pop(OTHER_RANKS, ())]
    if 0 < place <= len(others):
        state = others[place - 1]
        own["position"] = state.position
        own["lightning"] = {**own["lightning"], "loops": state.loops}
        own["engine"] = {**own["engine"], "statistics": state.statistics}
    return 1 + len(others)


# -------------------------------------------------------------------- shares of the data


class DataShares(NamedTuple):
    """The proportion in which the workers of a run share the data; readers of one share it evenly.

    Attributes:
        by_worker: One number for each worker.
        replica_size: Number of ranks of a worker.
        num_readers: Number of its ranks that read different data. Default: all.
    """

    by_worker: list[int]
    replica_size: int = 1
    num_readers: int | None = None

    @property
    def of_readers(self) -> list[int]:
        """One number for each rank, or ranks that read the same data."""
        count = self.num_readers or self.replica_size
        return [share for share in self.by_worker for _ in range(count)]

    def __str__(self) -> str:
        count, size = len(self.by_worker), self.replica_size
        text = "1 worker" if count == 1 else f"{count} workers"
        return text if size == 1 else f"{text} of {size} ranks"


class ResumedPosition:
    """Restores a position, also one that was saved with another number of workers or ranks.

    If a sampler divides the data among the ranks, their common progress counts: the epoch is
    divided again, and the batches that were trained on are read and skipped. If each rank has its
    own data, they continue where they were. A new worker has the position of worker 0, and a new
    rank of a worker the position of its first rank.

    ``before`` and ``now`` are the shares of the former and the present ranks.
    """

    def __init__(
        self, position: Position, before: DataShares, now: DataShares, worker: int
    ) -> None:
        self._position = position
        self._before = before
        self._now = now
        self._worker = worker
        self._loader_states: list[Any] = []

    def prepare_loops(self, loops: dict[str, Any], trainer: pl.Trainer) -> None:
        """Prepare the counters of a checkpoint before Lightning loads them."""
        saved = loops["fit_loop"]["state_dict"]
        self._loader_states = saved.get("combined_loader", [])
        if self._before != self._now:
            # A loader's state is a position in the former share of the data.
            saved.pop("combined_loader", None)
        self._position.prepare_loops(loops, trainer)

    def restore(self, trainer: pl.Trainer, divides: bool = True) -> list[str]:
        """Restore the position, after Lightning has restored its loops.

        ``divides`` is False for members of an elastic group, which divide the data themselves.
        Returns notes on the parts that do not continue where they were.
        """
        notes = self._changes_of_data(trainer)
        lightning_compat.load_loader_states(trainer)
        if (
            divides
            and self._before != self._now
            and self._position.phase not in ("next epoch", "stopped")
        ):
            # a single rank has no distributed sampler
            is_single = len(self._now.of_readers) == 1
            if is_distributed(trainer) or (is_single and self._position.is_distributed):
                notes += self._divide_again(trainer)
            else:
                self._load_states(trainer)
        elif self._before == self._now and self._begins_epoch(trainer):
            lightning_compat.forget_batches_read(trainer, self._loader_states)
        self._position.restore(trainer)
        return notes

    def _begins_epoch(self, trainer: pl.Trainer) -> bool:
        """Whether the next batch is the first one of an epoch that is not the first."""
        if self._position.phase == "next epoch":
            return trainer.current_epoch > 0
        has_ended = self._position.phase in ("batch end", "validation end")
        return has_ended and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def _changes_of_data(self, trainer: pl.Trainer) -> list[str]:
        """Describe how the training data differ from the saved run's."""
        before, now = self._position.samples, samples_of(trainer)
        if before is None or now is None or len(before) != len(now):
            return []
        notes = []
        for (old_size, old_seed), (size, seed) in zip(before, now, strict=True):
            if None not in (old_size, size) and old_size != size:
                notes.append(f"the training data have {size} samples and had {old_size}")
            if None not in (old_seed, seed) and old_seed != seed:
                notes.append(
                    f"samples are in the order of seed {seed} and were in the order of seed "
                    f"{old_seed}: call seed_everything({old_seed}) before"
                )
        return notes

    def _load_states(self, trainer: pl.Trainer) -> None:
        loaders = [one for one in train_loaders(trainer) if hasattr(one, "load_state_dict")]
        for loader, state in zip(loaders, self._loader_states, strict=False):
            loader.load_state_dict(state)
        if loaders:
            lightning_compat.start_epoch_data(trainer)

    def _divide_again(self, trainer: pl.Trainer) -> list[str]:
        lightning_compat.start_epoch_data(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        length = int(trainer.num_training_batches)
        count = length
        if not progress.is_last_batch:
            # At least one batch is left to train on, so that the epoch has an end.
            count = min(self._rescaled(progress.current.ready), length - 1)
            count -= count % trainer.accumulate_grad_batches
            lightning_compat.skip_batches(trainer, count)
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, count)
        return [f"the data of the epoch are divided again, from batch {count} of {length} on"]

    def _rescaled(self, batches: int) -> int:
        """Return the batches of this rank when all together have read as much as before."""
        before, now = self._before, self._now
        former = self._worker if self._worker < len(before.by_worker) else 0
        read = batches * sum(before.of_readers) * now.by_worker[self._worker]
        return read // (before.by_worker[former] * sum(now.of_readers))

    def other_workers(self, own: str) -> list[str]:
        """Describe the effect on ``own``, a part of each worker, if workers are gone or new."""
        before, now = len(self._before.by_worker), len(self._now.by_worker)
        if now < before:
            return [f"{own} of {_span('worker', now, before)} are dropped"]
        if now > before:
            return [
                f"new are {_span('worker', before, now)}, with {own} of worker 0 and random "
                "numbers from their own seed"
            ]
        return []

    def other_ranks(self) -> list[str]:
        """Describe the effect on random numbers if workers have more or fewer ranks."""
        before, now = self._before.replica_size, self._now.replica_size
        if now < before:
            return [f"the random numbers of {_span('place', now, before)} of a worker are dropped"]
        if now > before:
            return [
                f"new are {_span('place', before, now)} of a worker, with random numbers from "
                "their own seed"
            ]
        return []

    def warn_of(self, notes: list[str], trained_with: str = "", train_with: str = "") -> None:
        """Warn of what does not continue where it was, if anything."""
        if notes:
            rank_zero_warn(
                f"The checkpoint was written by {self._before}{trained_with}, and "
                f"{self._now}{train_with} go on from it: {'; '.join(notes)}."
            )


def _span(noun: str, first: int, end: int) -> str:
    return f"{noun} {first}" if end == first + 1 else f"{noun}s {first} to {end - 1}"


# --------------------------------------------------------------- random number generators


def random_states() -> dict[str, Any]:
    """Return the states of all random number generators, as plain values and tensors.

    That of CUDA is included only if this process already uses CUDA.
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if torch.cuda.is_initialized():  # asking would initialize it, which takes memory of the GPU
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set all random number generators to states that :func:`random_states` has returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
