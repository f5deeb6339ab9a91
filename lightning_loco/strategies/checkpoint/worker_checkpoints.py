"""Checkpoints of the consensus, with the state of each worker in side files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_loco._util.checks import check_choice
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine.gathered_state import gather_state, own_state
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.position import (
    OTHER_RANKS,
    READERS,
    DataShares,
    Position,
    RankState,
    ResumedPosition,
)
from lightning_loco.strategies.checkpoint.reader import (
    READING,
    SavedRun,
    check_same_save,
    choose_save,
    other_one_named,
    path_on_own_disk,
    read_main,
    resumed_by_all,
)
from lightning_loco.strategies.checkpoint.side_files import (
    AFTER_ERROR,
    KEY,
    NEW_RUN,
    Manifest,
    SideFiles,
    errors_naming,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save, save_where_stopped
from lightning_loco.strategies.data import samples_read
from lightning_loco.strategies.protocols import StrategyWithEngine

_CPU = torch.device("cpu")
_SAVING = "a checkpoint"
_OF_LIGHTNING = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")


class WorkerCheckpoints:
    """Writes and reads the checkpoints of workers with an engine each.

    The main file is an ordinary checkpoint of the consensus; its entry ``"lightning_loco"`` names
    the :class:`~lightning_loco.strategies.checkpoint.side_files.SideFiles`, from which a run
    resumes exactly. The folder is ``"shared"`` if all workers see the same files, ``"private"`` if
    each may have its own disk.
    """

    _has_shards = False

    def __init__(self, strategy: StrategyWithEngine, folder: str = "shared") -> None:
        check_choice("checkpoint_folder", folder, ("shared", "private"))
        self._strategy = strategy
        self._is_private = folder == "private"
        self._writes_main: bool | None = None
        self._writers: set[int] | None = None
        self._resumed: tuple[SavedRun, ResumedPosition] | None = None
        self._saved_on_stop: int | None = None

    @property
    def _engine(self) -> LocalParticipant | None:
        return self._strategy.engine if self._strategy.is_connected else None

    def start_fit(self) -> None:
        """Reset the records of an earlier fit; with private folders, prepare to choose a save.

        ValueError if private folders do not work with the ``CheckpointIO``, or with workers that
        have ranks on several nodes.
        """
        self._saved_on_stop = None
        self._writers = None
        if self._is_private:
            size, on_node = self._strategy.replica_size, self._strategy.num_processes
            if self._strategy.num_nodes > 1 and on_node % size:
                raise ValueError(
                    "checkpoint_folder='private' needs workers whose ranks are all on one node, "
                    f"and with replica_size={size} and {on_node} ranks on a node a worker is on "
                    "several. Use a replica_size that divides the ranks of a node, or "
                    "checkpoint_folder='shared'."
                )
            if not isinstance(self._strategy.checkpoint_io, TorchCheckpointIO):
                raise ValueError(
                    "checkpoint_folder='private' needs a CheckpointIO that has written a file when "
                    f"it returns, as TorchCheckpointIO does, got {self._strategy.checkpoint_io}. "
                    "Use checkpoint_folder='shared', or leave checkpoint_io out."
                )
        module = self._strategy.lightning_module
        assert module is not None
        lightning_compat.choose_checkpoint(module.trainer, self._choose)

    # ------------------------------------------------------------------------- save

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the consensus for the main file; during ``fit`` all workers must call it."""
        with self.consensus_shown():
            state = read()
            is_writer = self._engine is not None and self._strategy.is_global_zero
            if self._has_shards or is_writer:
                state = {
                    name: value.detach().to(_CPU, copy=True) if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
        return state

    @contextmanager
    def consensus_shown(self) -> Iterator[None]:
        """A context with the consensus in the module, also for hooks that collect a checkpoint.

        During ``fit`` all workers must enter it. A worker whose fit has failed is alone: the module
        then holds its local parameters. RuntimeError on rank 0, which would save them, if a round
        has failed while it was being applied.
        """
        engine = self._engine
        if engine is None or engine.worker.replica.shows_consensus:
            if (failed := self._strategy.failed_engine) is not None:
                if self._strategy.is_global_zero:
                    self._check_whole(failed)
                failed.worker.show_local()  # the consensus may be written only in part
            yield
            return
        self._strategy.sync_point("checkpoint")
        self._strategy.show_consensus("checkpoint of the consensus")
        try:
            yield
        finally:
            engine.worker.show_local()

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write the side files of every worker, then the main file; all ranks must call it.

        Rank 0 writes the main file. Without the optimizers' states (``weights_only``) or
        outside ``fit``, there are no side files. If ``fit`` has failed, rank 0 writes its state
        alone. OSError on every rank if one cannot write its files; the checkpoint that existed
        before is still complete.
        """
        io, engine = self._strategy.checkpoint_io, self._engine
        write_main = self._main_writer(checkpoint, storage_options)
        failed = self._strategy.failed_engine
        if failed is not None and self._strategy.is_global_zero:
            is_whole = failed.worker.group.replica_size == 1 and failed.worker.steps > 0
            if is_whole and "optimizer_states" in checkpoint:
                self._save_alone(failed, checkpoint, path, write_main)
                return
        if engine is None:
            self._write_parts(checkpoint, str(path))
            if self._strategy.is_global_zero:
                write_main(path)
            return
        group = engine.worker.group
        names = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = group.gather_from_ranks(names, _SAVING)[0]
        if self._is_private:
            path = path_on_own_disk(path)
        files = SideFiles(io, path)
        save = Save(files, stamp, None, None, write_main)
        if "optimizer_states" in checkpoint:
            stopped = engine.worker.stop_agreed
            self._saved_on_stop = checkpoint["global_step"] if stopped else None
            checkpoint[KEY] = Manifest.of(engine, stamp).state_dict()
            own, shared = self._worker_state(engine, checkpoint, files, stamp)
            save = save._replace(own=own, shared=shared)
        self._write_parts(checkpoint, files.staged_main(stamp) if files.can_stage else str(path))
        write = save.to_private_folders if self._is_private else save.to_shared_folder
        self._writes_main = write(group)

    def _check_whole(self, failed: LocalParticipant) -> None:
        """Raise RuntimeError if a round has failed while it was being applied."""
        try:
            failed.check_whole()
        except RuntimeError as torn:
            if self._strategy.engine is not None:  # a callback saves before the fit is closed
                assert self._strategy.lightning_module is not None
                trainer = self._strategy.lightning_module.trainer
                lightning_compat.close_failed_fit(trainer, torn.__context__ or torn)
            raise

    def _save_alone(
        self,
        failed: LocalParticipant,
        checkpoint: dict[str, Any],
        path: str | Path,
        write_main: Callable[[str], None],
    ) -> None:
        """Write the state of worker 0, whose fit has failed; the others do the same, or are gone.

        Rounds that are pending are not in it, because the others may never send their part.
        """
        failed.drop_pending()
        files = SideFiles(self._strategy.checkpoint_io, path)
        stamp, before = new_stamp(failed.worker.steps), files.stamps()
        checkpoint[KEY] = {**Manifest.of(failed, stamp).state_dict(), AFTER_ERROR: True}
        own, shared = self._worker_state(failed, checkpoint, files, stamp)
        assert own is not None
        save = Save(files, stamp, own, shared, write_main)
        try:
            files.save(stamp, 0, own)
            save.write_shared(files.can_stage)
            save.commit(files.can_stage, before, [0])
        except Exception:
            files.discard(stamp)
            raise

    def _main_writer(
        self, checkpoint: dict[str, Any], storage_options: Any
    ) -> Callable[[str | Path], None]:
        """Return a function that writes the main file, or the rest of it; called on one rank."""
        io = self._strategy.checkpoint_io
        return partial(io.save_checkpoint, checkpoint, storage_options=storage_options)

    def _write_parts(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write the parts of the main file that several ranks write; all ranks call it."""

    def _worker_state(
        self, engine: LocalParticipant, checkpoint: dict[str, Any], files: SideFiles, stamp: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the state of this worker alone, and the state that is equal on all workers.

        In a worker of several ranks the first one gets both for the whole worker, and all ranks
        must call it. None if there is none, or another rank writes it.
        """
        module = self._strategy.lightning_module
        assert module is not None
        group, has_shared = engine.worker.group, engine.settings.algorithm.replicated
        with _errors_shared_inside(group):
            state, position = engine.state_dict(), Position.of(module.trainer)
        of_rank = RankState(position._asdict(), checkpoint["loops"], state["statistics"])
        with _errors_shared_inside(group):
            others = group.gather_states_inside(of_rank._asdict(), _SAVING)[1:]
        if has_shared and group.worker > 0 and not self._is_private:
            del state["shared"]  # worker 0 writes it
            has_shared = False
        if (whole := self._gathered(engine, state, files, stamp)) is None:
            return None, None
        shared = {"shared": whole.pop("shared")} if has_shared else None
        own: dict[str, Any] = {
            "engine": whole,
            "position": of_rank.position,
            "stream": self._samples_read(position),
            "lightning": {key: checkpoint[key] for key in _OF_LIGHTNING if key in checkpoint},
        }
        if others:
            own |= {OTHER_RANKS: others, READERS: self._num_readers}
        return to_device((own, shared), _CPU)

    def _gathered(
        self, engine: LocalParticipant, state: dict[str, Any], files: SideFiles, stamp: str
    ) -> dict[str, Any] | None:
        """Return the state of the whole worker on its first rank, None on others."""
        return gather_state(state, engine.worker.replica)

    def _samples_read(self, position: Position) -> int | None:
        """Return how many samples all ranks have read, for members that join and leave."""
        strategy = self._strategy
        if (connection := strategy.member_connection) is not None:
            return connection.data_shard.first_unused
        if not position.is_distributed:
            return None
        assert strategy.lightning_module is not None
        trainer, is_epoch_over = strategy.lightning_module.trainer, position.phase == "next epoch"
        reader = strategy.distributed_sampler_kwargs["rank"]
        return samples_read(trainer, strategy.data_shares, reader, is_epoch_over)

    def save_interrupted(self, trainer: pl.Trainer, reason: str) -> None:
        """Save after an agreed stop, unless that was done already; all workers must call it."""
        save_where_stopped(trainer, reason, self._saved_on_stop == trainer.global_step)

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint and its side files."""
        writes_main = self._writes_main
        if self._strategy.is_global_zero if writes_main is None else writes_main:
            self._strategy.checkpoint_io.remove_checkpoint(path)
            SideFiles(self._strategy.checkpoint_io, path).remove()

    # ----------------------------------------------------------------------- resume

    def _choose(self, path: str | Path | None) -> str | Path | None:
        """Return the checkpoint to resume from; None if there is none.

        ValueError on all ranks if only some of them have one, or with private folders if the
        workers have none in common.
        """
        group = self._strategy.group
        assert group is not None
        if not self._is_private:
            return resumed_by_all(group, path)
        chosen = choose_save(group, self._strategy.checkpoint_io, path)
        if chosen is None:
            return None
        self._writers = chosen.writers
        return chosen.path

    def load(
        self,
        read: Callable[[], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; in ``fit``, with this worker's own loops and optimizers.

        ``weights_only`` is False if there may be other objects than tensors and numbers. ValueError
        on every worker if a file is missing or damaged.
        """
        self._resumed = None
        if not self._strategy.is_fitting:
            return read_main(read, path)
        group, io = self._strategy.group, self._strategy.checkpoint_io
        assert group is not None
        with group.errors_shared(READING):
            shares = self._shares()
            with self._other_one_named(path):
                loaded = read_main(read, path)
                if KEY in loaded:
                    self._load_own_state(loaded, SideFiles(io, path), path, weights_only, shares)
        check_same_save(group, loaded, path)
        if KEY not in loaded:
            rank_zero_info(
                f"{path} has no state of the workers, as if it was written without lightning_loco "
                "or after fit: all workers start from its model and optimizer."
            )
        return loaded

    def _other_one_named(self, path: str | Path) -> AbstractContextManager[None]:
        """Return a context in which an error names another checkpoint that is intact."""
        own = self._strategy.worker if self._is_private else None
        return other_one_named(self._strategy.checkpoint_io, path, own, self._has_shards)

    def _load_own_state(
        self,
        loaded: dict[str, Any],
        files: SideFiles,
        path: str | Path,
        weights_only: bool | None,
        shares: DataShares,
    ) -> None:
        strategy, writers = self._strategy, self._writers
        rank = strategy.worker, strategy.place
        with errors_naming(path):
            run = SavedRun(loaded[KEY], files, path, *rank, weights_only, writers)
            before = run.shares()
        run.own["engine"] = self._complete(run.own["engine"], files, run)
        with errors_naming(run.name):
            loaded.update(run.own["lightning"])
            position = ResumedPosition(run.position(), before, shares, strategy.worker)
            assert strategy.lightning_module is not None
            position.prepare_loops(loaded["loops"], strategy.lightning_module.trainer)
        self._resumed = run, position

    def _complete(self, state: dict[str, Any], files: SideFiles, run: SavedRun) -> dict[str, Any]:
        """Return the state of an engine in a side file with its vectors; ValueError without."""
        if isinstance(state.get("params"), dict):
            raise ValueError(
                f"{files.path} was written by LocoModelParallelStrategy, whose ranks write their "
                f"shards. Resume with that strategy. {NEW_RUN}"
            )
        return state

    def _shares(self) -> DataShares:
        """Return in what proportion the workers share the data."""
        schedule, num_workers = self._strategy.schedule, self._strategy.num_workers
        if schedule is not None:
            schedule.check(num_workers)
        shares = [1] * num_workers if schedule is None else schedule.shares(num_workers)
        return DataShares(shares, self._strategy.replica_size, self._num_readers)

    @property
    def _num_readers(self) -> int:
        """Number of ranks of a worker that read different data."""
        readers: int = self._strategy.distributed_sampler_kwargs["num_replicas"]
        return readers // self._strategy.num_workers

    @property
    def is_resuming(self) -> bool:
        """Whether :meth:`load` has read a state for :meth:`resume`."""
        return self._resumed is not None

    def resume(self, trainer: pl.Trainer) -> None:
        """Resume from the state that :meth:`load` has read, right before training starts.

        With other settings or another number of workers, the state is used as far as it fits, and
        one warning on worker 0 describes the rest. ValueError on every worker if something is
        missing.
        """
        if self._resumed is None:
            return
        run, position = self._resumed
        self._resumed = None
        engine, notes = self._engine, []
        assert engine is not None
        if run.equals(engine):
            with (
                engine.worker.group.errors_shared("the start of training"),
                errors_naming(run.name),
            ):
                engine.load_state_dict(own_state(run.own["engine"], engine.worker.replica))
        else:
            with errors_naming(run.name):
                notes += engine.resume_from(run.earlier_run(engine))
        connection = self._strategy.member_connection
        notes += position.restore(trainer, divides=connection is None)
        if connection is not None:
            stream = run.own.get("stream")
            if stream is None:
                notes.append("the members start at the beginning of the data")
            else:
                connection.data_shard.start_at(stream)
        notes += position.other_workers("the optimizers, schedules and positions")
        notes += position.other_ranks() + run.missing()
        if notes:
            before, now = position.numbers()
            rank_zero_warn(
                f"The checkpoint was written by {before} with {run.algorithm}, and {now} with "
                f"{type(engine.settings.algorithm).__name__} go on from it: {'; '.join(notes)}."
            )


def _errors_shared_inside(group: WorkerGroup) -> AbstractContextManager[None]:
    """A context for work that the ranks of a worker do together; without effect for one rank.

    All ranks of all workers raise the error that one raises inside.
    """
    return group.errors_shared(_SAVING) if group.replica_size > 1 else nullcontext()


def to_device(data: Any, device: torch.device) -> Any:
    """Move all tensors of a collection to a device; a tensor that occurs twice stays one tensor.

    Fragments of a model share vectors of its whole length, which a file then holds only once.
    """
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    return apply_to_collection(data, Tensor, move)
