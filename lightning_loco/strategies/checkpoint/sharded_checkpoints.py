"""Checkpoints of workers whose ranks hold shards: the vectors of each worker are in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_loco.distributed.devices import CPU
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies.checkpoint.atomic_io import META, local_path
from lightning_loco.strategies.checkpoint.position import DataShares
from lightning_loco.strategies.checkpoint.reader import READING, SavedRun, read_main
from lightning_loco.strategies.checkpoint.shard_folder import (
    SHARED_SHARDS,
    ShardFolder,
    check_folder,
    write_folder,
)
from lightning_loco.strategies.checkpoint.side_files import NEW_RUN, SHARDS, SideFiles, stamps_in
from lightning_loco.strategies.checkpoint.worker_checkpoints import WorkerCheckpoints
from lightning_loco.strategies.protocols import StrategyWithEngine


def path_on_file_system(path: str | Path) -> str:
    """Return the path of a file or folder without ``file://``; ValueError for other addresses."""
    if (local := local_path(path)) is None:
        raise ValueError(
            f"Workers that shard the model save folders, each rank a part of them, and {path} is "
            "not on a file system. Save to a path that all machines share, and copy it from there."
        )
    return str(local)


class ShardedCheckpoints(WorkerCheckpoints):
    """Checkpoints of workers whose ranks hold shards of the model.

    The main file is an ordinary checkpoint of the consensus: one file, or a folder to which each
    rank of worker 0 writes its shards, as Lightning's ``ModelParallelStrategy`` does. A side file
    has the state of a worker without vectors and the states of optimizers, which are in a folder
    beside it (:class:`~lightning_loco.strategies.checkpoint.shard_folder.ShardFolder`).
    """

    _has_shards = True

    def __init__(self, strategy: StrategyWithEngine, *, saves_folders: bool) -> None:
        super().__init__(strategy)
        self._saves_folders = saves_folders

    def start_fit(self) -> None:
        """Prepare a fit; ValueError for folders of callbacks that are not on a file system."""
        super().start_fit()
        module = self._strategy.lightning_module
        assert module is not None
        trainer = module.trainer
        for callback in trainer.checkpoint_callbacks:
            path_on_file_system(getattr(callback, "dirpath", None) or trainer.default_root_dir)

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write the checkpoint, see :meth:`WorkerCheckpoints.save`."""
        super().save(checkpoint, path_on_file_system(path), storage_options)

    def load(
        self,
        read: Callable[[], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Check the files of a checkpoint and read it, see :meth:`WorkerCheckpoints.load`."""
        strategy = self._strategy
        group = strategy.group if strategy.is_fitting else None
        agreed = nullcontext() if group is None else group.errors_shared(READING)
        with agreed, self._other_one_named(path):
            self._check_main(str(path), weights_only)
        if strategy.is_fitting:
            for optimizer in strategy.optimizers:
                optimizer.zero_grad()  # torch loads no states if there are gradients
            if not stamps_in(str(path), strategy.checkpoint_io):
                return super().load(read, path, weights_only)

        def read_weights() -> dict[str, Any]:
            # The states of the optimizers are in the side files, complete or not.
            found, strategy.optimizers = strategy.optimizers, []
            try:
                return read()
            finally:
                strategy.optimizers = found

        return super().load(read_weights, path, weights_only)

    def _check_main(self, path: str, weights_only: bool | None) -> None:
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

    def _main_writer(
        self, checkpoint: dict[str, Any], storage_options: Any
    ) -> Callable[[str | Path], None]:
        if not self._saves_folders:
            return super()._main_writer(checkpoint, storage_options)
        io = self._strategy.checkpoint_io
        return lambda path: io.save_checkpoint(checkpoint, f"{path}/{META}", storage_options)

    def _write_parts(self, checkpoint: dict[str, Any], path: str) -> None:
        if not self._saves_folders:
            checkpoint[SHARDS] = {}
            return
        state = checkpoint.pop("state_dict")
        optimizers = enumerate(checkpoint.pop("optimizer_states", ()))
        content = {"state_dict": state, **{f"optimizer_{n}": found for n, found in optimizers}}
        if self._strategy.is_global_zero and os.path.isfile(path):
            os.unlink(path)
        own = content if self._strategy.worker == 0 else {}
        checkpoint[SHARDS] = write_folder(own, path, dist.group.WORLD)

    def _gathered(
        self, engine: LocalParticipant, state: dict[str, Any], files: SideFiles, stamp: str
    ) -> dict[str, Any] | None:
        held = super()._gathered(engine, state, files, stamp)
        assert held is not None
        worker = engine.worker.group.worker
        model, folder = self._strategy.model, self._folder(engine, files, stamp, worker)
        assert model is not None
        is_replicated = engine.settings.algorithm.replicated
        optimizers = self._strategy.optimizers
        try:
            with engine.worker.group.errors_shared("writing a checkpoint"):
                plain = folder.write(held, model, optimizers, is_replicated=is_replicated)
        except Exception:
            if self._strategy.is_global_zero:
                files.discard(stamp)
            raise
        return plain if engine.worker.group.place == 0 else None

    def _worker_state(
        self, engine: LocalParticipant, checkpoint: dict[str, Any], files: SideFiles, stamp: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        own, shared = super()._worker_state(engine, checkpoint, files, stamp)
        if own is not None:
            own["lightning"]["optimizer_states"] = []
            if shared is not None and SHARED_SHARDS in own["engine"]:
                shared[SHARED_SHARDS] = own["engine"].pop(SHARED_SHARDS)
        return own, shared

    def _load_own_state(
        self,
        loaded: dict[str, Any],
        files: SideFiles,
        path: str | Path,
        weights_only: bool | None,
        shares: DataShares,
    ) -> None:
        super()._load_own_state(loaded, files, path, weights_only, shares)
        assert self._engine is not None
        assert self._resumed is not None
        (run, _), model = self._resumed, self._strategy.model
        assert model is not None
        folder = self._folder(self._engine, files, run.stamp, run.worker)
        folder.read_optimizers(model, self._strategy.optimizers)

    def _complete(self, state: dict[str, Any], files: SideFiles, run: SavedRun) -> dict[str, Any]:
        if not isinstance(state.get("params"), dict):
            raise ValueError(
                f"{files.path} was written by workers whose ranks hold the whole model. Resume "
                f"with the strategy that has written it. {NEW_RUN}"
            )
        assert self._engine is not None
        return self._folder(self._engine, files, run.stamp, run.worker).read(state)

    def _folder(
        self, engine: LocalParticipant, files: SideFiles, stamp: str, worker: int
    ) -> ShardFolder:
        folders = files.shards(stamp, worker), files.shards(stamp, None)
        return ShardFolder(*folders, engine.worker.replica, engine.worker.group)
