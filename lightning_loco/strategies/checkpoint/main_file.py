"""The main file: one file of rank 0, or a folder to which the ranks of a worker write shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_loco.distributed.devices import CPU
from lightning_loco.engine.gathered_state import gather_state
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies.checkpoint.atomic_io import META, disk_of, local_path
from lightning_loco.strategies.checkpoint.reader import (
    READING,
    SavedRun,
    other_one_named,
    read_main,
)
from lightning_loco.strategies.checkpoint.shard_folder import (
    ShardFolder,
    check_folder,
    write_folder,
)
from lightning_loco.strategies.checkpoint.side_files import NEW_RUN, SHARDS, SideFiles, stamps_in
from lightning_loco.strategies.protocols import StrategyWithEngine, TrainingStrategy

WriteMain = Callable[[str | Path], None]
"""Writes the main file, or the rest of it, to a path; called on one rank."""


class MainFile:
    """A main file that rank 0 writes alone, with the whole model; so are the vectors in side files.

    ``has_shards`` says whether the ranks of a worker write their own shards instead.
    """

    has_shards = False

    def __init__(self, strategy: TrainingStrategy) -> None:
        self._strategy = strategy

    def writer(self, checkpoint: dict[str, Any], storage_options: Any) -> WriteMain:
        """Return the function that writes the main file, when all ranks have written their parts.

        ``checkpoint`` may change until then.
        """
        io = self._strategy.checkpoint_io
        return partial(io.save_checkpoint, checkpoint, storage_options=storage_options)

    def write_parts(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write the parts that several ranks write, and take them out; all ranks must call it."""

    def other_one_named(
        self, path: str | Path, worker: int | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which a ValueError names another checkpoint that is intact.

        The side file of ``worker`` must exist for it, or of all workers if None.
        """
        return other_one_named(self._strategy.checkpoint_io, path, worker, self.has_shards)

    def prepare(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None
    ) -> Callable[[], dict[str, Any]]:
        """Return the function that reads the main file; all ranks must call it."""
        return read

    # ------------------------------------------------- the state of a worker in side files

    def gather(
        self, engine: LocalParticipant, state: dict[str, Any], files: SideFiles, stamp: str
    ) -> dict[str, Any] | None:
        """Return the state of the whole worker on its first rank, None on others.

        All ranks of the worker must call it.
        """
        return gather_state(state, engine.worker.replica)

    def complete(self, run: SavedRun, files: SideFiles) -> None:
        """Add to the state of an engine what is not in its side file; ValueError without."""
        if isinstance(run.own["engine"].get("params"), dict):
            raise ValueError(
                f"{files.path} was written by workers whose ranks hold shards. Resume with the "
                f"strategy that has written it. {NEW_RUN}"
            )


def path_on_file_system(path: str | Path) -> str:
    """Return the path of a file or folder without ``file://``; ValueError for other addresses."""
    if (local := local_path(path)) is None:
        raise ValueError(
            f"Workers that shard the model save folders, each rank a part of them, and {path} is "
            "not on a file system. Save to a path that all machines share, and copy it from there."
        )
    return str(local)


class ShardedMainFile(MainFile):
    """A main file of workers whose ranks hold shards of the model.

    It is one file, or a folder to which each rank of worker 0 writes its shards, as Lightning's
    ``ModelParallelStrategy`` does. A side file has the state of a worker without vectors and the
    states of optimizers, which are in a folder beside it
    (:class:`~lightning_loco.strategies.checkpoint.shard_folder.ShardFolder`).
    """

    has_shards = True
    _strategy: StrategyWithEngine

    def __init__(self, strategy: StrategyWithEngine, *, saves_folders: bool) -> None:
        super().__init__(strategy)
        self._saves_folders = saves_folders

    def writer(self, checkpoint: dict[str, Any], storage_options: Any) -> WriteMain:
        """Return the function that writes the main file, or what is not in shards of it."""
        if not self._saves_folders:
            return super().writer(checkpoint, storage_options)
        io = self._strategy.checkpoint_io
        disk = disk_of(io)

        def write(path: str | Path) -> None:
            for name in checkpoint.get(SHARDS, ()):
                if not disk.is_file(f"{path}/{name}"):
                    raise OSError(
                        f"{path}/{name} has been deleted while the checkpoint was written, as by "
                        "another run that saves to the same path. Let each run save to its own "
                        "folder."
                    )
            io.save_checkpoint(checkpoint, f"{path}/{META}", storage_options)

        return write

    def write_parts(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write the shards of the model and the optimizers of worker 0 to the folder."""
        if not self._saves_folders:
            checkpoint[SHARDS] = {}
            return
        state = checkpoint.pop("state_dict")
        optimizers = enumerate(checkpoint.pop("optimizer_states", ()))
        content = {"state_dict": state, **{f"optimizer_{n}": found for n, found in optimizers}}
        # The folder cannot be made where there is a file of its name.
        if self._strategy.is_global_zero and os.path.isfile(path):
            os.unlink(path)
        # The consensus is the same on all workers; the other ranks take part in the collectives.
        own = content if self._strategy.worker == 0 else {}
        checkpoint[SHARDS] = write_folder(own, path, dist.group.WORLD)

    def prepare(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None
    ) -> Callable[[], dict[str, Any]]:
        """Check the main file; return the function that reads it, without states of optimizers.

        Those are in the side files, complete or not; without side files they are read as well.
        """
        strategy = self._strategy
        group = strategy.group if strategy.is_fitting else None
        agreed = nullcontext() if group is None else group.errors_shared(READING)
        with agreed, self.other_one_named(path):
            self._check(str(path), weights_only)
        if strategy.is_fitting:
            for optimizer in strategy.optimizers:
                optimizer.zero_grad()  # torch loads no states if there are gradients
            if not stamps_in(str(path), strategy.checkpoint_io):
                return read

        def read_weights() -> dict[str, Any]:
            found, strategy.optimizers = strategy.optimizers, []
            try:
                return read()
            finally:
                strategy.optimizers = found

        return read_weights

    def _check(self, path: str, weights_only: bool | None) -> None:
        """Check the main file if it is a folder; ValueError on all ranks if one cannot use it."""
        damage, files, rest = None, dict[str, Any](), f"{path}/{META}"
        if os.path.isdir(path):
            read = partial(torch.load, rest, map_location=CPU, weights_only=weights_only)
            try:
                files = read_main(read, rest).get(SHARDS, {})
            except (OSError, ValueError) as error:
                damage = f"The checkpoint {path} is incomplete or damaged: {error}"
        elif not os.path.exists(path):
            damage = f"There is no checkpoint {path}. All ranks must see the same files"
        check_folder(path, files, dist.group.WORLD, damage and damage.removesuffix("."))

    # ------------------------------------------------- the state of a worker in side files

    def gather(
        self, engine: LocalParticipant, state: dict[str, Any], files: SideFiles, stamp: str
    ) -> dict[str, Any] | None:
        """Write the vectors to the worker's folder; return the rest on its first rank."""
        group, strategy, model = engine.worker.group, self._strategy, self._strategy.model
        held = super().gather(engine, state, files, stamp)
        assert held is not None
        assert model is not None
        folder = self._folder(files, stamp, group.worker)
        is_replicated = engine.settings.algorithm.replicated
        try:
            with group.errors_shared("writing a checkpoint"):
                plain = folder.write(held, model, strategy.optimizers, is_replicated=is_replicated)
        except Exception:
            if strategy.is_global_zero:
                files.discard(stamp)
            raise
        return plain if group.place == 0 else None

    def complete(self, run: SavedRun, files: SideFiles) -> None:
        """Read the vectors and the optimizers' states from the worker's folder."""
        state, strategy = run.own["engine"], self._strategy
        if not isinstance(state.get("params"), dict):
            raise ValueError(
                f"{files.path} was written by workers whose ranks hold the whole model. Resume "
                f"with the strategy that has written it. {NEW_RUN}"
            )
        assert strategy.model is not None
        folder = self._folder(files, run.stamp, run.worker)
        run.own["engine"] = folder.read(state)
        folder.read_optimizers(strategy.model, strategy.optimizers)

    def _folder(self, files: SideFiles, stamp: str, worker: int) -> ShardFolder:
        engine = self._strategy.engine
        assert engine is not None
        folders = files.shards(stamp, worker), files.shards(stamp, None)
        return ShardFolder(*folders, engine.worker.replica, engine.worker.group)
