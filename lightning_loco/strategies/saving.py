"""Checkpoints of the consensus, with each worker's own state beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_loco.comm import WorkerGroup
from lightning_loco.rounds import RoundSettings
from lightning_loco.rounds.engine import Engine
from lightning_loco.strategies import checkpoint as side
from lightning_loco.strategies.meeting import MeetingStrategy


class SavingStrategy(MeetingStrategy):
    """Writes and reads checkpoints; see :mod:`lightning_loco.strategies.checkpoint`."""

    settings: RoundSettings
    engine: Engine | None = None
    _resumed: dict[str, Any] | None = None
    _saved_on_stop = False

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("The engine exists only during Trainer.fit.")
        return self.engine

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus, for the checkpoint."""
        if not self._is_training or self._engine.replica.shows_consensus:
            return super().lightning_module_state_dict()
        self._meet("checkpoint")
        self._engine.show_consensus("checkpoint of the consensus")
        state = super().lightning_module_state_dict()
        if self.is_global_zero:
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        self._engine.show_local()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the side file of every worker, then the main file."""
        if not self._is_training or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        engine = self._engine
        self._saved_on_stop = engine.stop_agreed is not None
        proposal = (str(filepath), side.new_stamp(engine.steps))
        path, stamp = engine.group.gather_objects(proposal)[0]
        error: Exception | None = None
        try:
            side.save_worker(self.checkpoint_io, engine, checkpoint, path, stamp)
        except OSError as found:
            error = found
        engine.group.raise_together(error)
        if self.is_global_zero:
            checkpoint[side.KEY] = side.describe(engine, stamp)
            super().save_checkpoint(checkpoint, path, storage_options)
            side.remove_side_files(self.checkpoint_io, path, keep=stamp)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the main file and, to resume training, this worker's side file."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        self._resumed = None
        if self._trainer.state.fn != TrainerFn.FITTING:
            return loaded
        if side.KEY not in loaded:
            rank_zero_info(
                f"{checkpoint_path} was not written by lightning_loco: its model and optimizer are "
                "the common start of all workers."
            )
            return loaded
        error: Exception | None = None
        try:
            self._resumed = side.load_worker(
                self.checkpoint_io,
                loaded[side.KEY],
                self.settings.algorithm,
                self.worker,
                self.num_workers,
                str(checkpoint_path),
            )
        except ValueError as found:
            error = found
        control = torch.distributed.group.WORLD if self.num_workers > 1 else None
        WorkerGroup(self.worker, self.num_workers, control=control).raise_together(error)
        assert self._resumed is not None
        loaded.update(self._resumed["lightning"])
        self._resumed["new_epoch"] = side.forget_finished_epoch(loaded)
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint and its side files."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            side.remove_side_files(self.checkpoint_io, str(filepath))
