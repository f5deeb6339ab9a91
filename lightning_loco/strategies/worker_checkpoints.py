"""Checkpoints of the consensus, with each worker's own state beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_loco.strategies.interrupted import save_where_stopped
from lightning_loco.strategies.main_file import KEY, NEW_RUN, entry_of, new_stamp
from lightning_loco.strategies.positions import Position
from lightning_loco.strategies.resumed_place import ResumedPlace
from lightning_loco.strategies.saved_run import SavedRun
from lightning_loco.strategies.side_files import SideFiles

if TYPE_CHECKING:
    from lightning_loco.strategies.driven import Engine
    from lightning_loco.strategies.engine_strategy import EngineStrategy

S = TypeVar("S")
T = TypeVar("T")

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
        self._resumed: tuple[SavedRun, ResumedPlace] | None = None
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
            ValueError: On every worker, if the side files are missing or damaged.
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
        group = self._strategy.group
        assert group is not None
        with group.errors_shared("reading the checkpoint"):
            files = SideFiles(self._strategy.checkpoint_io, path)
            run = SavedRun(loaded[KEY], files, path, self._strategy.worker, weights_only)
            shares = self._shares()
        loaded.update(run.own["lightning"])
        place = ResumedPlace(run.position(), run.shares(), shares, self._strategy.worker)
        place.enter(loaded["loops"])
        self._resumed = run, place
        return loaded

    def _shares(self) -> list[int]:
        schedule, num_workers = self._strategy.schedule, self._strategy.num_workers
        if schedule is None:
            return [1] * num_workers
        schedule.check(num_workers)
        return schedule.shares(num_workers)

    @property
    def is_resuming(self) -> bool:
        """Whether :meth:`load` has read what :meth:`resume` is to go on from."""
        return self._resumed is not None

    def resume(self, trainer: pl.Trainer) -> None:
        """Go on from what :meth:`load` has read, if it has; right before training starts.

        With other settings or another number of workers, as much as fits is taken over, and one
        warning on worker 0 says what becomes of the rest.

        Raises:
            ValueError: On every worker, if something is missing in a side file.
        """
        if self._resumed is None:
            return
        run, place = self._resumed
        self._resumed = None
        engine, notes = self._engine, []
        assert engine is not None
        if run.equals(engine):
            with engine.worker.group.errors_shared("the start of training"):
                self._load(run, engine.load_state_dict, run.own["engine"])
        else:
            notes += self._load(run, self._strategy.begin_anew, run.saved())
        notes += place.restore(trainer)
        notes += place.other_workers("the optimizers, schedules and positions")
        if notes:
            before, now = place.numbers()
            rank_zero_warn(
                f"The checkpoint was written by {before} with {run.algorithm}, and {now} with "
                f"{type(engine.settings.algorithm).__name__} go on from it: {'; '.join(notes)}."
            )

    def _load(self, run: SavedRun, load: Callable[[S], T], state: S) -> T:
        try:
            return load(state)
        except KeyError as missing:
            raise ValueError(f"{run.name} has no {missing} of the engine. {NEW_RUN}") from missing

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
