"""Checkpoints of the consensus, with each worker's own state beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.strategies.interrupted import save_where_stopped
from lightning_loco.strategies.main_file import KEY, NEW_RUN, check_entry, entry_of, new_stamp
from lightning_loco.strategies.positions import Position
from lightning_loco.strategies.side_files import SideFiles

if TYPE_CHECKING:
    from lightning_loco.strategies.driven import Engine
    from lightning_loco.strategies.engine_strategy import EngineStrategy

_CPU = torch.device("cpu")
_OF_LIGHTNING = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")


class WorkerCheckpoints:
    """Writes and reads the checkpoints of workers that move independently.

    The main file is an ordinary one of the consensus; its entry ``"lightning_loco"`` ties it to the
    :class:`~lightning_loco.strategies.side_files.SideFiles`, from which a run resumes exactly.

    Args:
        strategy: Whose checkpoints they are; its engine, workers and files are used.
    """

    def __init__(self, strategy: EngineStrategy) -> None:
        self._strategy = strategy
        self._resumed: tuple[str, dict[str, Any], Position] | None = None
        self._saved_on_stop = False

    def begin_fit(self) -> None:
        """Forget that an earlier fit was stopped."""
        self._saved_on_stop = False

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The consensus, for the main file; during ``fit`` all workers must call it.

        Args:
            read: Reads what the module holds.
        """
        with self.consensus_shown():
            state = read()
            if self._engine is not None and self._strategy.is_global_zero:
                state = {
                    name: value.detach().to(_CPU, copy=True) if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
        return state

    @contextmanager
    def consensus_shown(self) -> Iterator[None]:
        """Show the consensus, also to hooks that read the module for a checkpoint.

        During ``fit`` all workers must enter it.
        """
        engine = self._engine
        if engine is None or engine.worker.replica.shows_consensus:
            yield
            return
        self._strategy.meet("checkpoint")
        engine.worker.show_consensus("checkpoint of the consensus")
        try:
            yield
        finally:
            engine.worker.show_local()

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write the side files of every worker, then the main file; all workers must call it.

        Without the optimizers' states (``weights_only``) or outside ``fit``, there are no side
        files.

        Args:
            checkpoint: What Lightning has collected on this worker.
            path: The main file; worker 0's word counts.
            storage_options: Passed on to the ``CheckpointIO``.

        Raises:
            OSError: On every worker, if one cannot write its files; the checkpoint that was there
                is still complete.
            ValueError: On every worker, if the side folder is a symbolic link.
        """
        io, writes_main = self._strategy.checkpoint_io, self._strategy.is_global_zero
        engine = self._engine
        if engine is None or "optimizer_states" not in checkpoint:
            if writes_main:
                io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        self._saved_on_stop = engine.worker.stop_agreed is not None
        group = engine.worker.group
        names = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = group.gather_objects(names, "a checkpoint")[0]
        files = SideFiles(io, path)
        own, shared = self._parts(engine, checkpoint)
        try:
            with group.errors_shared("writing a checkpoint"):
                files.save(stamp, group.worker, own, shared)
            with group.errors_shared("writing a checkpoint"):
                if writes_main:
                    checkpoint[KEY] = entry_of(engine, stamp)
                    io.save_checkpoint(checkpoint, path, storage_options=storage_options)
                    files.settle(stamp)
        except Exception:
            if writes_main:
                files.drop(stamp)
            raise

    def load(
        self, loaded: dict[str, Any], path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Complete the main file with this worker's own state, to resume training.

        Args:
            loaded: What Lightning has read.
            path: From where.
            weights_only: As it was read: False if other objects than tensors and numbers may be.

        Raises:
            ValueError: On every worker, if the checkpoint does not fit this run, or side files are
                missing.
        """
        self._resumed = None
        if not self._strategy.is_fitting:
            return loaded
        if KEY not in loaded:
            rank_zero_info(
                f"{path} was not written by lightning_loco: its model and optimizer are "
                "the common start of all workers."
            )
            return loaded
        num_workers, group = self._strategy.num_workers, self._strategy.group
        error: Exception | None = None
        try:
            algorithm = self._strategy.settings.algorithm
            stamp = check_entry(loaded[KEY], algorithm, num_workers, path)
            name, own = self._read(stamp, algorithm, path, weights_only)
        except (ValueError, OSError) as found:
            error = found
        assert group is not None
        group.raise_together(error, "reading the checkpoint")
        loaded.update(own["lightning"])
        position = Position(**own["position"])
        position.enter(loaded["loops"])
        self._resumed = name, own["engine"], position
        return loaded

    @property
    def is_resuming(self) -> bool:
        """Whether :meth:`load` has read what :meth:`resume` is to go on from."""
        return self._resumed is not None

    def resume(self, trainer: pl.Trainer) -> None:
        """Go on from what :meth:`load` has read, if it has; right before training starts.

        Raises:
            ValueError: On every worker, if something is missing in a side file.
        """
        if self._resumed is None:
            return
        name, engine_state, position = self._resumed
        self._resumed = None
        assert self._engine is not None
        with self._engine.worker.group.errors_shared("the start of training"):
            try:
                self._engine.load_state_dict(engine_state)
            except KeyError as missing:
                raise ValueError(f"{name} has no {missing} of the engine. {NEW_RUN}") from missing
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
        return self._strategy.engine if self._strategy.has_company else None

    def _read(
        self, stamp: str, algorithm: Algorithm, path: str | Path, weights_only: bool | None
    ) -> tuple[str, Any]:
        """The name of this worker's own file, and all that it needs."""
        files = SideFiles(self._strategy.checkpoint_io, path)
        try:
            own, shared = files.load(
                stamp, self._strategy.worker, algorithm.replicated, weights_only
            )
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{error} {NEW_RUN}") from error
        name = files.name_of(stamp, self._strategy.worker)
        for key, entries in (
            ("engine", ()),
            ("lightning", ("loops",)),
            ("position", Position._fields),
        ):
            for entry in ("", *entries):
                if key not in own or (entry and entry not in own[key]):
                    raise ValueError(f"{name} has no {entry or key!r}. {NEW_RUN}")
        own["engine"].update(shared)
        return name, own

    def _parts(
        self, engine: Engine, checkpoint: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What goes into this worker's own file, and what is the same on all workers."""
        module = self._strategy.lightning_module
        assert module is not None
        state, shared = engine.state_dict(), None
        if engine.settings.algorithm.replicated:
            shared = {"shared": state.pop("shared")}
        own = {
            "engine": state,
            "position": Position.of(module.trainer)._asdict(),
            "lightning": {key: checkpoint[key] for key in _OF_LIGHTNING if key in checkpoint},
        }
        return move_data_to_device(own, _CPU), move_data_to_device(shared, _CPU)
