"""Checkpoints of the consensus, with each worker's own state beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.strategies.interrupted import save_where_stopped
from lightning_loco.strategies.positions import Position, forget_finished_epoch
from lightning_loco.strategies.random_states import random_states
from lightning_loco.strategies.side_files import SideFiles, new_stamp

if TYPE_CHECKING:
    from lightning_loco.strategies.driven import Engine
    from lightning_loco.strategies.engine_strategy import EngineStrategy

_KEY = "lightning_loco"
_FORMAT = 2
_OF_LIGHTNING = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")
_NEW_RUN = (
    "To start a new run from its weights alone, use "
    "YourModule.load_from_checkpoint(path) and fit without ckpt_path."
)


class WorkerCheckpoints:
    """Writes and reads the checkpoints of workers that move independently.

    The main file is an ordinary one of the consensus; its entry ``"lightning_loco"`` ties it to the
    :class:`~lightning_loco.strategies.side_files.SideFiles`, from which a run resumes exactly.

    Args:
        strategy: Whose checkpoints they are; its engine, workers and files are used.
    """

    def __init__(self, strategy: EngineStrategy) -> None:
        self._strategy = strategy
        self._resumed: tuple[dict[str, Any], Position] | None = None
        self._saved_on_stop = False

    def begin_fit(self) -> None:
        """Forget that an earlier fit was stopped."""
        self._saved_on_stop = False

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The consensus, for the main file; during ``fit`` all workers must call it.

        Args:
            read: Reads what the module holds.
        """
        engine = self._engine
        if engine is None or engine.worker.replica.shows_consensus:
            return read()
        self._strategy.meet("checkpoint")
        engine.worker.show_consensus("checkpoint of the consensus")
        state = read()
        if self._strategy.is_global_zero:
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        engine.worker.show_local()
        return state

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write the side files of every worker, then the main file; all workers must call it.

        Without the optimizers' states (``weights_only``) or outside ``fit``, there are no side
        files.

        Args:
            checkpoint: What Lightning has collected on this worker.
            path: The main file; worker 0's word counts.
            storage_options: Passed on to the ``CheckpointIO``.

        Raises:
            OSError: On every worker, if one cannot write its side files.
        """
        io, writes_main = self._strategy.checkpoint_io, self._strategy.is_global_zero
        engine = self._engine
        if engine is None or "optimizer_states" not in checkpoint:
            if writes_main:
                io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        self._saved_on_stop = engine.worker.stop_agreed is not None
        group = engine.worker.group
        own = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = group.gather_objects(own, "a checkpoint")[0]
        files = SideFiles(io, path)
        with group.errors_shared("writing a checkpoint"):
            files.save(stamp, group.worker, *_parts(engine, checkpoint))
        if writes_main:
            checkpoint[_KEY] = _entry(engine, stamp)
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            files.remove(keep=stamp)

    def load(self, loaded: dict[str, Any], path: str | Path) -> dict[str, Any]:
        """Complete the main file with this worker's own state, to resume training.

        Args:
            loaded: What Lightning has read.
            path: From where.

        Raises:
            ValueError: On every worker, if the checkpoint does not fit this run, or side files are
                missing.
        """
        self._resumed = None
        if not self._strategy.is_fitting:
            return loaded
        if _KEY not in loaded:
            rank_zero_info(
                f"{path} was not written by lightning_loco: its model and optimizer are "
                "the common start of all workers."
            )
            return loaded
        num_workers, group = self._strategy.num_workers, self._strategy.group
        error: Exception | None = None
        try:
            entry, algorithm = loaded[_KEY], self._strategy.settings.algorithm
            _check_fit(entry, algorithm, num_workers, path)
            own = self._read(entry["stamp"], algorithm, path)
        except ValueError as found:
            error = found
        assert group is not None
        group.raise_together(error, "reading the checkpoint")
        loaded.update(own["lightning"])
        position = Position(own["random"], forget_finished_epoch(loaded))
        self._resumed = own["engine"], position
        return loaded

    def resume(self, trainer: pl.Trainer) -> None:
        """Go on from what :meth:`load` has read, if it has; right before training starts."""
        if self._resumed is not None:
            engine_state, position = self._resumed
            self._resumed = None
            assert self._engine is not None
            self._engine.load_state_dict(engine_state)
            position.restore(trainer)

    def save_interrupted(self, trainer: pl.Trainer, reason: str) -> None:
        """Save once more after an agreed stop, unless that is done; all workers must call it."""
        save_where_stopped(trainer, reason, self._saved_on_stop)

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint and its side files."""
        if self._strategy.is_global_zero:
            self._strategy.checkpoint_io.remove_checkpoint(path)
            SideFiles(self._strategy.checkpoint_io, path).remove()

    @property
    def _engine(self) -> Engine | None:
        return self._strategy.engine if self._strategy.is_training else None

    def _read(self, stamp: str, algorithm: Algorithm, path: str | Path) -> dict[str, Any]:
        files = SideFiles(self._strategy.checkpoint_io, path)
        try:
            own, shared = files.load(stamp, self._strategy.worker, algorithm.replicated)
        except FileNotFoundError as missing:
            raise ValueError(f"{missing} {_NEW_RUN}") from missing
        own["engine"].update(shared)
        return own


def _entry(engine: Engine, stamp: str) -> dict[str, Any]:
    """The entry of the main file that ties it to its side files: plain values only."""
    return {
        "format": _FORMAT,
        "stamp": stamp,
        "num_workers": engine.worker.group.num_workers,
        "algorithm": type(engine.settings.algorithm).__name__,
        "settings": engine.settings.describe(),
        "round_index": engine.worker.round_index,
    }


def _parts(
    engine: Engine, checkpoint: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What goes into this worker's own file, and what is the same on all workers."""
    state, shared = engine.state_dict(), None
    if engine.settings.algorithm.replicated:
        shared = {"shared": state.pop("shared")}
    own = {
        "engine": state,
        "random": random_states(),
        "lightning": {key: checkpoint[key] for key in _OF_LIGHTNING if key in checkpoint},
    }
    return own, shared


def _check_fit(
    entry: dict[str, Any], algorithm: Algorithm, num_workers: int, path: str | Path
) -> None:
    """Refuse a checkpoint of another format, algorithm or number of workers."""
    if entry["format"] != _FORMAT:
        raise ValueError(
            f"The side files of {path} have format {entry['format']}, and this version of "
            f"lightning_loco reads format {_FORMAT} only. {_NEW_RUN}"
        )
    if entry["algorithm"] != type(algorithm).__name__:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['algorithm']} and cannot be resumed with "
            f"{type(algorithm).__name__}. {_NEW_RUN}"
        )
    if entry["num_workers"] != num_workers:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['num_workers']} workers and this run has "
            f"{num_workers}; each worker resumes from its own state. {_NEW_RUN}"
        )
