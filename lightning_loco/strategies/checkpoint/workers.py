"""Checkpoints of the consensus, with each worker's own state beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_loco.engine.membership import Link
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.manifest import (
    KEY,
    NEW_RUN,
    content_of,
    entry_of,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.other_checkpoint import other_one_named, read_main
from lightning_loco.strategies.checkpoint.position import (
    Place,
    Position,
    ResumedPlace,
    deals_out,
    train_loaders,
)
from lightning_loco.strategies.checkpoint.reader import SavedRun, choose_save, path_on_own_disk
from lightning_loco.strategies.checkpoint.side_files import SideFiles
from lightning_loco.strategies.checkpoint.writer import (
    Save,
    save_apart,
    save_together,
    save_where_stopped,
)
from lightning_loco.strategies.driven import link_of
from lightning_loco.values import check_choice

if TYPE_CHECKING:
    from lightning_loco.strategies.base import EngineStrategy
    from lightning_loco.strategies.driven import Engine

S = TypeVar("S")
T = TypeVar("T")

_CPU = torch.device("cpu")
_OF_LIGHTNING = ("loops", "optimizer_states", "lr_schedulers", "MixedPrecision", "HalfPrecision")


class WorkerCheckpoints:
    """Writes and reads the checkpoints of workers that move independently.

    The main file is an ordinary one of the consensus; its entry ``"lightning_loco"`` ties it to the
    :class:`~lightning_loco.strategies.checkpoint.side_files.SideFiles`, from which a run resumes
    exactly.

    Args:
        strategy: Whose checkpoints they are; its engine, workers and files are used.
        folder: ``"shared"`` if all workers see the same files, ``"private"`` if each may have a
            disk of its own.

    Raises:
        ValueError: If ``folder`` is something else.
    """

    def __init__(self, strategy: EngineStrategy, folder: str = "shared") -> None:
        check_choice("checkpoint_folder", folder, ("shared", "private"))
        self._strategy = strategy
        self._is_private = folder == "private"
        self._writes_main: bool | None = None
        self._readers: dict[int, int] | None = None
        self._resumed: tuple[SavedRun, ResumedPlace] | None = None
        self._saved_on_stop: int | None = None

    def begin_fit(self) -> None:
        """Forget an earlier fit; on disks of their own, the workers will agree on a checkpoint.

        Raises:
            ValueError: If files are written in a way that does not work on such disks.
        """
        self._saved_on_stop = None
        self._readers = None
        if self._is_private:
            if not isinstance(self._strategy.checkpoint_io, TorchCheckpointIO):
                raise ValueError(
                    "checkpoint_folder='private' needs a CheckpointIO that has written a file when "
                    f"it returns, as TorchCheckpointIO does, got {self._strategy.checkpoint_io}. "
                    "Use checkpoint_folder='shared', or leave checkpoint_io out."
                )
            module = self._strategy.lightning_module
            assert module is not None
            lightning_compat.choose_checkpoint(module.trainer, self._choose)

    def _choose(self, path: str | Path | None) -> str | Path | None:
        """The checkpoint on this worker's disk that all go on from; None if there is none."""
        group = self._strategy.group
        assert group is not None
        chosen = choose_save(group, self._strategy.checkpoint_io, path)
        if chosen is None:
            return None
        self._readers = chosen.readers()
        return chosen.path

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
        self._strategy.sync_point("checkpoint")
        engine.show_consensus("checkpoint of the consensus")
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
        """
        io, engine = self._strategy.checkpoint_io, self._engine
        write_main = partial(io.save_checkpoint, checkpoint, storage_options=storage_options)
        if engine is None:
            if self._strategy.is_global_zero:
                write_main(path)
            return
        group = engine.worker.group
        names = [str(path), new_stamp(engine.worker.steps)]
        path, stamp = group.gather_objects(names, "a checkpoint")[0]
        if self._is_private:
            path = path_on_own_disk(path)
        save = Save(SideFiles(io, path), stamp, None, None, write_main)
        if "optimizer_states" in checkpoint:
            stopped = engine.worker.stop_agreed
            self._saved_on_stop = checkpoint["global_step"] if stopped else None
            checkpoint[KEY] = entry_of(engine, stamp)
            own, shared = self._parts(engine, checkpoint)
            save = save._replace(own=own, shared=shared)
        self._writes_main = (save_apart if self._is_private else save_together)(group, save)

    def load(
        self,
        read: Callable[[], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Complete the main file with this worker's own state, to resume training.

        Args:
            read: Reads the main file, as Lightning does.
            path: From where.
            weights_only: As it is read: False if other objects than tensors and numbers may be.

        Raises:
            ValueError: On every worker, if a file is missing or damaged.
        """
        self._resumed = None
        if not self._strategy.is_fitting:
            return read_main(read, path)
        group, io = self._strategy.group, self._strategy.checkpoint_io
        assert group is not None
        own = self._strategy.worker if self._is_private else None
        with group.errors_shared("reading the checkpoint"):
            shares = self._shares()
            with other_one_named(io, path, own):
                loaded = read_main(read, path)
                if KEY in loaded:
                    self._complete(loaded, path, weights_only, shares)
        if KEY not in loaded:
            rank_zero_info(
                f"{path} was not written by lightning_loco: its model and optimizer are "
                "the common start of all workers."
            )
        return loaded

    def _complete(
        self,
        loaded: dict[str, Any],
        path: str | Path,
        weights_only: bool | None,
        shares: list[int],
    ) -> None:
        strategy, readers = self._strategy, self._readers
        files = SideFiles(strategy.checkpoint_io, path)
        run = SavedRun(loaded[KEY], files, path, strategy.worker, weights_only, readers)
        with content_of(path):
            before = run.shares()
        with content_of(run.name):
            loaded.update(run.own["lightning"])
            place = ResumedPlace(run.position(), before, shares, strategy.worker)
            place.enter(loaded["loops"])
        self._resumed = run, place

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
            notes += self._load(run, self._strategy.reset, run.saved())
        link = link_of(engine)
        notes += place.restore(trainer, deals=link is None)
        notes += [] if link is None else go_on_in_stream(link, run.own.get("stream"))
        notes += place.other_workers("the optimizers, schedules and positions") + run.lost()
        if notes:
            before, now = place.numbers()
            rank_zero_warn(
                f"The checkpoint was written by {before} with {run.algorithm}, and {now} with "
                f"{type(engine.settings.algorithm).__name__} go on from it: {'; '.join(notes)}."
            )

    def _load(self, run: SavedRun, load: Callable[[S], T], state: S) -> T:
        with content_of(run.name):
            try:
                return load(state)
            except KeyError as missing:
                text = f"{run.name} has no {missing} of the engine. {NEW_RUN}"
                raise ValueError(text) from missing

    def save_interrupted(self, trainer: pl.Trainer, reason: str) -> None:
        """Save once more after an agreed stop, unless that is done; all workers must call it."""
        save_where_stopped(trainer, reason, self._saved_on_stop == trainer.global_step)

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint and its side files."""
        writes_main = self._writes_main
        if self._strategy.is_global_zero if writes_main is None else writes_main:
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
        position = Position.of(module.trainer)
        own = {
            "engine": state,
            "position": position._asdict(),
            "stream": stream_position(engine, module.trainer, position.place, self._shares()),
            "lightning": {key: checkpoint[key] for key in _OF_LIGHTNING if key in checkpoint},
        }
        return moved_once((own, shared), _CPU)


def moved_once(data: Any, device: torch.device) -> Any:
    """A collection with all tensors on a device, where one that it holds twice stays one.

    Fragments of a model share vectors of its whole length, and a file has them once then.
    """
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    return apply_to_collection(data, Tensor, move)


def stream_position(
    engine: Engine, trainer: pl.Trainer, place: Place, shares: list[int]
) -> int | None:
    """The first sample that no worker has taken; None if there is no such stream.

    Args:
        engine: Of this worker.
        trainer: Within ``fit``.
        place: Where its loops are.
        shares: In what proportion the workers share the data, one number each.
    """
    if (link := link_of(engine)) is not None:
        return link.share.reach
    loaders = train_loaders(trainer)
    if len(loaders) != 1 or not deals_out(trainer):
        return None
    (loader,) = loaders
    sampler = lightning_compat.sampler_of(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    assert isinstance(sampler, DistributedSampler)
    if batch_size is None:
        return None
    size, loop = len(cast(Sized, sampler.dataset)), trainer.fit_loop
    batches = 0 if place == "next epoch" else loop.epoch_loop.batch_progress.current.ready
    own = shares[engine.worker.group.worker]
    taken = min(batches * batch_size * sum(shares) // own, size)
    epochs: Any = loop.epoch_progress.current
    return int(epochs.processed) * size + taken


def go_on_in_stream(link: Link, position: int | None) -> list[str]:
    """Let a member go on from a position, and say what it cannot go on from."""
    if position is None:
        return ["the members begin at the first of the data"]
    link.share.begin_at(position)
    return []
