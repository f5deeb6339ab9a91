"""What workers with parameters of their own save: the consensus, and each one's state beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_loco._util.checks import check_choice
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine.gathered_state import own_state
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.checkpoints import Loaded, RunState
from lightning_loco.strategies.checkpoint.main_file import MainFile, WriteMain
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
    path_on_own_disk,
    read_main,
    resumed_by_all,
)
from lightning_loco.strategies.checkpoint.shard_folder import SHARED_SHARDS
from lightning_loco.strategies.checkpoint.side_files import (
    AFTER_ERROR,
    KEY,
    Manifest,
    SideFiles,
    errors_naming,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save, save_together
from lightning_loco.strategies.data import samples_read
from lightning_loco.strategies.protocols import StrategyWithEngine

_CPU = torch.device("cpu")
_SAVING = "a checkpoint"
_OF_LIGHTNING = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")


class LocalState(RunState):
    """The consensus in the main file, and the state of each worker in a side file.

    The main file is an ordinary checkpoint; its entry ``"lightning_loco"`` names the
    :class:`~lightning_loco.strategies.checkpoint.side_files.SideFiles`, from which a run resumes
    exactly. The folder is ``"shared"`` if all workers see the same files, ``"private"`` if each may
    have its own disk.
    """

    def __init__(
        self, strategy: StrategyWithEngine, main: MainFile, folder: str = "shared"
    ) -> None:
        check_choice("checkpoint_folder", folder, ("shared", "private"))
        self.main = main
        self._strategy = strategy
        self._is_private = folder == "private"
        self._writers: set[int] | None = None
        self._run: SavedRun | None = None

    @property
    def _engine(self) -> LocalParticipant | None:
        return self._strategy.engine if self._strategy.is_connected else None

    @property
    def is_shared(self) -> bool:
        """Whether the workers are connected, also after the end of training."""
        return self._engine is not None

    def start_fit(self) -> None:
        """Prepare to choose a checkpoint; with private folders, one that all workers have.

        ValueError if private folders do not work with the ``CheckpointIO``, or with workers that
        have ranks on several nodes.
        """
        # What was loaded stays: a learning rate finder loads after its fit, for the next one.
        self._writers = None
        if self._is_private:
            size, on_node = self._strategy.replica_size, self._strategy.ranks_per_node
            if self._strategy.num_ranks > on_node and on_node % size:
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
            # Copies, because the local parameters come back before the file is written.
            if self.main.has_shards or is_writer:
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

    def agree_on(self, path: str | Path, checkpoint: dict[str, Any]) -> tuple[str | Path, str]:
        """Return the path and the stamp of rank 0: callbacks of others may name other files."""
        engine = self._engine
        assert engine is not None
        names = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = engine.worker.group.gather_from_ranks(names, _SAVING)[0]
        return path_on_own_disk(path) if self._is_private else path, stamp

    def collect(
        self, checkpoint: dict[str, Any], files: SideFiles, stamp: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Name the side files in the main file, and return their contents."""
        assert self._engine is not None
        checkpoint[KEY] = Manifest.of(self._engine, stamp).state_dict()
        return self._worker_state(self._engine, checkpoint, files, stamp)

    def write(self, save: Save) -> bool:
        """Write the side files of every worker, then the main file."""
        assert self._engine is not None
        group = self._engine.worker.group
        to_shared_folder = partial(save.to_shared_folder, num_workers=group.num_workers)
        return save_together(
            save.to_private_folders if self._is_private else to_shared_folder, group
        )

    def save_alone(
        self, checkpoint: dict[str, Any], path: str | Path, write_main: WriteMain
    ) -> None:
        """Write the main file; with the state of worker 0 if its fit has failed after a step."""
        failed, is_first = self._strategy.failed_engine, self._strategy.is_global_zero
        if failed is not None and is_first and "optimizer_states" in checkpoint:
            steps, group = failed.worker.steps, failed.worker.group
            # The other ranks of a worker, which hold parts of its state, do not answer any more.
            if steps > 0 and group.replica_size == 1:
                self._save_failed(failed, checkpoint, path, write_main)
                return
        self.main.write_parts(checkpoint, str(path))
        if is_first:
            write_main(path)

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

    def _save_failed(
        self,
        failed: LocalParticipant,
        checkpoint: dict[str, Any],
        path: str | Path,
        write_main: WriteMain,
    ) -> None:
        """Write the state of worker 0, whose fit has failed; the others do the same, or are gone.

        Rounds that are pending are not in it, because the others may never send their part.
        """
        failed.drop_pending()
        files, stamp = SideFiles(self._strategy.checkpoint_io, path), new_stamp(failed.worker.steps)
        checkpoint[KEY] = {**Manifest.of(failed, stamp).state_dict(), AFTER_ERROR: True}
        save = Save(files, stamp, *self._worker_state(failed, checkpoint, files, stamp), write_main)
        save_together(save.to_shared_folder, WorkerGroup(0, 1, ["worker 0"]))

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
        # Before the gathering, so that a rank that cannot save does not leave the others waiting.
        with _errors_shared_inside(group):
            state, position = engine.state_dict(), Position.of(module.trainer)
        of_rank = RankState(position._asdict(), checkpoint["loops"], state["statistics"])
        with _errors_shared_inside(group):
            others = group.gather_states_inside(of_rank._asdict(), _SAVING)[1:]
        if has_shared and group.worker > 0 and not self._is_private:
            del state["shared"]  # worker 0 writes it
            has_shared = False
        if (whole := self.main.gather(engine, state, files, stamp)) is None:
            return None, None
        shared = {"shared": whole.pop("shared")} if has_shared else None
        if shared is not None and SHARED_SHARDS in whole:
            shared[SHARED_SHARDS] = whole.pop(SHARED_SHARDS)
        lightning = {key: checkpoint[key] for key in _OF_LIGHTNING if key in checkpoint}
        if self.main.has_shards:
            lightning["optimizer_states"] = []  # they are in the folder of the shards
        own: dict[str, Any] = {
            "engine": whole,
            "position": of_rank.position,
            "stream": self._samples_read(position),
            "lightning": lightning,
        }
        if others:
            own |= {OTHER_RANKS: others, READERS: self._num_readers}
        return to_device((own, shared), _CPU)

    def _samples_read(self, position: Position) -> int | None:
        """Return how many samples all ranks have read, for members that join and leave."""
        # Also in a run of fixed workers: one with members may resume from it.
        strategy = self._strategy
        if (connection := strategy.member_connection) is not None:
            return connection.data_shard.first_unused
        if not position.is_distributed:
            return None
        assert strategy.lightning_module is not None
        trainer, is_epoch_over = strategy.lightning_module.trainer, position.phase == "next epoch"
        reader = strategy.distributed_sampler_kwargs["rank"]
        return samples_read(trainer, strategy.data_shares, reader, is_epoch_over)

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
        # With private folders Lightning would choose on each disk by itself.
        chosen = choose_save(group, self._strategy.checkpoint_io, path)
        if chosen is None:
            return None
        self._writers = chosen.writers
        return chosen.path

    def load(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None
    ) -> Loaded:
        """Read the main file and this worker's side file."""
        group, position = self._strategy.group, None
        assert group is not None
        worker = self._strategy.worker if self._is_private else None
        with group.errors_shared(READING):
            shares = self._shares()  # outside: its errors have nothing to do with a file
            with self.main.other_one_named(path, worker):
                loaded = read_main(read, path)
                if KEY in loaded:
                    position = self._load_own_state(loaded, path, weights_only, shares)
        check_same_save(group, loaded, path)
        if position is None:
            rank_zero_info(
                f"{path} has no state of the workers, as if it was written without lightning_loco "
                "or after fit: all workers start from its model and optimizer."
            )
        return loaded, position

    def _load_own_state(
        self,
        loaded: dict[str, Any],
        path: str | Path,
        weights_only: bool | None,
        shares: DataShares,
    ) -> ResumedPosition:
        strategy, files = self._strategy, SideFiles(self._strategy.checkpoint_io, path)
        rank = strategy.worker, strategy.place
        with errors_naming(path):
            run = SavedRun(loaded[KEY], files, path, *rank, weights_only, self._writers)
            before = run.shares()
        self.main.complete(run, files)
        with errors_naming(run.name):
            loaded.update(run.own["lightning"])
            position = ResumedPosition(run.position(), before, shares, strategy.worker)
            assert strategy.lightning_module is not None
            position.prepare_loops(loaded["loops"], strategy.lightning_module.trainer)
        self._run = run
        return position

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

    def resume(self, position: ResumedPosition, trainer: pl.Trainer) -> None:
        """Resume this worker; with other settings or workers, as far as its state fits."""
        engine, run, notes = self._engine, self._run, []
        assert engine is not None
        assert run is not None
        self._run = None  # which may be as large as the model
        # All workers take the same branch: settings are compared when an engine is made, and which
        # files are missing is known to all.
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
        now = type(engine.settings.algorithm).__name__
        position.warn_of(notes, f" with {run.algorithm}", f" with {now}")


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
