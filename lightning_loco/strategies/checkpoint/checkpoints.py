"""The checkpoints of a strategy: the hooks of Lightning, the same for every participant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_loco.strategies.checkpoint.main_file import MainFile, WriteMain
from lightning_loco.strategies.checkpoint.position import ResumedPosition
from lightning_loco.strategies.checkpoint.reader import read_main
from lightning_loco.strategies.checkpoint.side_files import SideFiles
from lightning_loco.strategies.checkpoint.writer import Save, save_where_stopped
from lightning_loco.strategies.protocols import TrainingStrategy

Loaded = tuple[dict[str, Any], ResumedPosition | None]
"""The content of a main file, and where this rank resumes; None if the file does not say so."""


class RunState(ABC):
    """What a participant adds to a checkpoint, and how its ranks agree while they save and load.

    Attributes:
        main: How the main file is written and read.
    """

    main: MainFile

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Whether all ranks that train save together; else one of them saves what it has."""

    @abstractmethod
    def start_fit(self) -> None:
        """Reset what is known of an earlier fit."""

    @abstractmethod
    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the evaluated model, of which ``read`` returns what the module has.

        During ``fit`` all ranks that train must call it.
        """

    # ------------------------------------------------------------------------- save

    @abstractmethod
    def agree_on(self, path: str | Path, checkpoint: dict[str, Any]) -> tuple[str | Path, str]:
        """Return the path of a save, and its stamp, which are equal on all ranks."""

    @abstractmethod
    def collect(
        self, checkpoint: dict[str, Any], files: SideFiles, stamp: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Add what resumes a run to the main file, and return what belongs into side files.

        Returns:
            The state of this worker alone, and the state that is equal on all workers; None if
            there is none, or another rank writes it.
        """

    @abstractmethod
    def write(self, save: Save) -> bool:
        """Write a save together; return whether this rank has written the main file."""

    @abstractmethod
    def save_alone(
        self, checkpoint: dict[str, Any], path: str | Path, write_main: WriteMain
    ) -> None:
        """Save outside ``fit``, or after it has failed."""

    # ----------------------------------------------------------------------- resume

    @abstractmethod
    def load(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None
    ) -> Loaded:
        """Read the main file by ``read`` and, to resume training, what :meth:`collect` has saved.

        All ranks must call it. ValueError on all that read if a file is missing or damaged.
        """

    @abstractmethod
    def resume(self, position: ResumedPosition, trainer: pl.Trainer) -> None:
        """Resume from what :meth:`load` has read, and warn of what does not continue."""


class Checkpoints:
    """Writes and reads the checkpoints of a run: an ordinary main file, and what ``state`` adds.

    A save is complete, and replaces the one before, only when all ranks have written their parts.
    What resumes a run is read when Lightning loads the checkpoint, and used right before training
    starts, because hooks in between need the model as it was saved.
    """

    def __init__(self, strategy: TrainingStrategy, state: RunState) -> None:
        self._strategy = strategy
        self._state = state
        self._position: ResumedPosition | None = None
        self._saved_on_stop: int | None = None
        self._writes_main: bool | None = None

    def start_fit(self) -> None:
        """Reset the records of an earlier fit."""
        self._saved_on_stop = None
        self._state.start_fit()

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the model's state for the main file; during ``fit`` all ranks must call it."""
        return self._state.model_state(read)

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write a checkpoint; all ranks that train must call it.

        Without the optimizers' states (``weights_only``) or outside ``fit``, it has no more than
        the main file. If ``fit`` has failed, rank 0 writes what it has alone. OSError on every rank
        if one cannot write its files; the checkpoint that existed before is still complete.
        """
        state, main = self._state, self._state.main
        write_main = main.writer(checkpoint, storage_options)
        if not state.is_shared:
            state.save_alone(checkpoint, path, write_main)
            return
        path, stamp = state.agree_on(path, checkpoint)
        files = SideFiles(self._strategy.checkpoint_io, path)
        own = shared = None
        if "optimizer_states" in checkpoint:
            participant = self._strategy.participant
            assert participant is not None
            # Asked before the others are waited for: a stop that is agreed on meanwhile is saved
            # again, where all have stopped.
            is_stopped = participant.stop_agreed is not None
            self._saved_on_stop = checkpoint["global_step"] if is_stopped else None
            own, shared = state.collect(checkpoint, files, stamp)
        main.write_parts(checkpoint, files.staged_main(stamp) if files.can_stage else str(path))
        self._writes_main = state.write(Save(files, stamp, own, shared, write_main))

    def save_interrupted(self, trainer: pl.Trainer, reason: str) -> None:
        """Save after an agreed stop, unless that was done already; all workers must call it."""
        save_where_stopped(trainer, reason, self._saved_on_stop == trainer.global_step)

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint and its side files, on the rank that writes the main file."""
        writes_main = self._writes_main
        if self._strategy.is_global_zero if writes_main is None else writes_main:
            io = self._strategy.checkpoint_io
            io.remove_checkpoint(path)
            if (files := SideFiles(io, path)).stamps():
                files.remove()

    # ----------------------------------------------------------------------- resume

    def load(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; in ``fit``, with this rank's own loops and optimizers.

        ``weights_only`` is False if there may be other objects than tensors and numbers. ValueError
        on every rank if a file is missing or damaged.
        """
        self._position = None
        read = self._state.main.prepare(read, path, weights_only)
        if not self._strategy.is_fitting:
            return read_main(read, path)
        loaded, self._position = self._state.load(read, path, weights_only)
        return loaded

    @property
    def is_resuming(self) -> bool:
        """Whether :meth:`load` has read a state for :meth:`resume`."""
        return self._position is not None

    def resume(self, trainer: pl.Trainer) -> None:
        """Resume from the state that :meth:`load` has read, right before training starts.

        With other settings or another number of workers, the state is used as far as it fits, and
        one warning on worker 0 describes the rest. ValueError on every worker if something is
        missing.
        """
        position, self._position = self._position, None
        if position is not None:
            self._state.resume(position, trainer)
