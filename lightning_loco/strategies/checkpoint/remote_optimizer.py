"""Checkpoints of a run whose optimizer is on another rank: ordinary ones, with its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_loco.parameter_server import RemoteOptimizer, RemoteParticipant
from lightning_loco.strategies.checkpoint.position import DataShares, Position, ResumedPosition
from lightning_loco.strategies.checkpoint.reader import (
    check_same_save,
    other_one_named,
    read_main,
)
from lightning_loco.strategies.checkpoint.side_files import (
    FORMAT,
    SideFiles,
    check_format,
    errors_naming,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save, save_where_stopped
from lightning_loco.strategies.protocols import StrategyWithRemoteOptimizer

_KEY = "lightning_loco_positions"
_FORMAT_KEY = "lightning_loco_format"


class RemoteCheckpoints:
    """Writes and reads one file with the optimizer's state and every worker's position."""

    def __init__(self, strategy: StrategyWithRemoteOptimizer) -> None:
        self._strategy = strategy
        self._resumed: ResumedPosition | None = None
        self._saved_on_stop: int | None = None
        self._final_state: dict[str, Any] = {}
        self._lost: str | None = None

    def start_fit(self) -> None:
        """Reset the records of an earlier fit."""
        self._saved_on_stop = None
        self._final_state = {}
        self._lost = None

    def finish_fit(self, remote: RemoteParticipant) -> None:
        """Keep the optimizer's state for checkpoints after ``fit``."""
        if self._strategy.is_global_zero:
            try:
                self._final_state = remote.state_dict()
            except TypeError as error:
                rank_zero_warn(f"Checkpoints after fit have no optimizer state: {error}")

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the optimizer on its rank; empty on all ranks except the first."""
        if not self._strategy.is_global_zero:
            return {}
        remote, module = self._strategy.remote, self._strategy.lightning_module
        if remote is None or remote.optimizer.has_left:
            if module is not None and module.trainer.interrupted and not self._final_state:
                self._lost = "the fit has ended"
            return self._final_state
        if self._strategy.is_training:
            return remote.state_dict()
        return self._state_after_failure(remote)

    def _state_after_failure(self, remote: RemoteParticipant) -> dict[str, Any]:
        """Return the state if the optimizer's rank still answers, as after an error of worker 0."""
        service = self._strategy.service
        assert service is not None
        assert service.watchdog is not None
        self._lost = ", ".join(service.watchdog.silent()) or service.watchdog.failure
        if self._lost is None:
            try:
                return remote.state_dict()
            except (RuntimeError, TypeError) as error:
                self._lost = str(error)
        return {}

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the model's state, with parameters that were not rounded by compression.

        All ranks that train must call it during ``fit``.
        """
        strategy = self._strategy
        remote, module = strategy.remote, strategy.lightning_module
        if not strategy.is_training:
            return read()
        assert remote is not None
        assert module is not None
        strategy.sync_point("checkpoint")  # brings a worker that has run out of data up to date
        state = read()
        is_rounded = strategy.compression is not None
        optimizer = remote.optimizer
        if strategy.is_global_zero and is_rounded and not optimizer.has_changed_parameters:
            values = {id(param): value for param, value in optimizer.full_precision_parameters()}
            for name, param in module.named_parameters(remove_duplicate=False):
                if name in state and id(param) in values:
                    state[name] = values[id(param)]
        return state

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write the file; during ``fit``, with each worker's loops and random states.

        All ranks that train must call it.
        """
        strategy = self._strategy
        if strategy.serves:
            return
        if strategy.is_training and "optimizer_states" in checkpoint:
            assert strategy.remote is not None
            assert strategy.lightning_module is not None
            self._saved_on_stop = checkpoint["global_step"] if strategy.remote.stop_agreed else None
            strategy.sync_point("checkpoint")
            position = Position.of(strategy.lightning_module.trainer)
            own = {"loops": checkpoint["loops"], "position": position._asdict()}
            checkpoint[_FORMAT_KEY] = FORMAT
            with strategy.waiting_in("a checkpoint"):
                checkpoint[_KEY] = strategy.training_ranks().gather_states(own, "a checkpoint")
        io = strategy.checkpoint_io
        write = partial(io.save_checkpoint, checkpoint, storage_options=storage_options)
        if strategy.is_training:
            stamp = new_stamp(checkpoint["global_step"])
            self._write_together(Save(SideFiles(io, path), stamp, None, None, write))
        elif strategy.is_global_zero and self._lost and "optimizer_states" in checkpoint:
            last_line = self._lost.strip().rpartition("\n")[2]
            # An error here would replace the run's, and keep Lightning from the teardown.
            rank_zero_warn(
                f"{path} was not written: the optimizer's state is on another rank, which does not "
                f"answer after a failure ({last_line}). Resume from an "
                "earlier checkpoint."
            )
        elif strategy.is_global_zero:
            write(path)

    def _write_together(self, save: Save) -> None:
        """Write the file, and rename it after another sync point, as ``Save`` does."""
        files, is_first = save.files, self._strategy.is_global_zero
        before: list[str] = []
        try:
            if is_first:
                before = files.stamps()
                save.write_shared(files.can_stage)
            self._strategy.sync_point("checkpoint")
            if is_first:
                save.commit(files.can_stage, before, [])
        except BaseException:
            if is_first:
                files.discard(save.stamp)
            raise

    def load(
        self,
        read: Callable[[], dict[str, Any]],
        path: str | Path,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, with this worker's loops where Lightning resumes from them.

        If there are more workers than before, the new ones resume from worker 0's loops, with their
        own random numbers, and the data are distributed again. ValueError if the file is damaged,
        or something is missing in it.
        """
        strategy = self._strategy
        if not strategy.is_fitting:
            return read_main(read, path)
        with other_one_named(strategy.checkpoint_io, path):
            loaded = read_main(read, path)
        if _KEY in loaded:
            check_format(loaded.get(_FORMAT_KEY), path)
        with other_one_named(strategy.checkpoint_io, path):
            if not strategy.serves:
                self._resumed = self._enter_position(loaded, path) if _KEY in loaded else None
        if strategy.service is not None:
            check_same_save(strategy.service, loaded, path)
        return loaded

    def _enter_position(self, loaded: dict[str, Any], path: str | Path) -> ResumedPosition:
        positions, rank = loaded[_KEY], self._strategy.global_rank  # one position for each rank
        with errors_naming(path):
            is_new = rank >= len(positions)
            own = positions[0 if is_new else rank]
            try:
                loaded["loops"], position = own["loops"], Position(**own["position"])
            except (KeyError, TypeError) as missing:
                text = f"{path} does not say where its workers were: {missing}."
                raise ValueError(text) from missing
            if is_new:
                position = position._replace(random=None)
            before = DataShares([1] * len(positions))
            now = DataShares([1] * self._strategy.world_size)
            resumed = ResumedPosition(position, before, now, rank)
            assert self._strategy.lightning_module is not None
            resumed.prepare_loops(loaded["loops"], self._strategy.lightning_module.trainer)
        return resumed

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint."""
        if self._strategy.is_global_zero:
            io = self._strategy.checkpoint_io
            io.remove_checkpoint(path)
            if (files := SideFiles(io, path)).stamps():
                files.remove()

    def load_param_groups(self, remote: RemoteOptimizer, checkpoint: Any) -> None:
        """Load learning rates and other numbers for a worker's schedulers.

        The optimizer's rank loads the whole state itself.
        """
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for present, group in zip(remote.param_groups, groups, strict=True):
            present.update({name: value for name, value in group.items() if name != "params"})

    def resume(self, trainer: pl.Trainer) -> None:
        """Restore the position that :meth:`load` has read, if any; right before training starts."""
        if self._resumed is None:
            return
        resumed, self._resumed = self._resumed, None
        changes = resumed.restore(trainer) + resumed.other_workers("the positions")
        if changes:
            before, now = resumed.numbers()
            rank_zero_warn(
                f"The checkpoint was written by {before}, and {now} go on from it: "
                f"{'; '.join(changes)}."
            )

    def save_interrupted(self, trainer: pl.Trainer, reason: str) -> None:
        """Save after an agreed stop, unless that is already done; all workers must call it."""
        save_where_stopped(trainer, reason, self._saved_on_stop == trainer.global_step)
