"""Checkpoints of a run whose optimizer is on another rank: ordinary ones, with its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_loco.strategies import resuming
from lightning_loco.strategies.served import ServedStrategy


class RemoteSavingStrategy(ServedStrategy):
    """Collects the optimizer's state into the checkpoint of worker 0, and gives it back.

    Attributes:
        wire_dtype: To which parameters are rounded on the wire; None if they are not.
    """

    wire_dtype: torch.dtype | None
    _final_state: dict[str, Any] | None = None
    _resumed: resuming.Resumed | None = None
    _saved_on_stop = False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that the optimizer has on its rank; only worker 0 needs it."""
        if not self.is_global_zero:
            return {}
        if self.remote is not None and not self._finished:
            return self.remote.state_dict()
        return self._final_state or {}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The rank of the optimizer loads its state; a worker, its settings only."""
        if self.serves:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.remote is not None
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for present, group in zip(self.remote.param_groups, groups, strict=True):
            present.update({name: value for name, value in group.items() if name != "params"})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model, with parameters that have not been rounded for the wire."""
        state = super().lightning_module_state_dict()
        if self._is_training and self.is_global_zero and self.wire_dtype is not None:
            assert self.remote is not None
            assert self.lightning_module is not None
            values = {id(param): value for param, value in self.remote.parameters_in_full()}
            for name, param in self.lightning_module.named_parameters(remove_duplicate=False):
                if name in state and id(param) in values:
                    state[name] = values[id(param)]
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Add each worker's own position and random state."""
        if self.serves:
            return
        if self._is_training and "optimizer_states" in checkpoint:
            assert self.remote is not None
            self._saved_on_stop = self.remote.stop_agreed is not None
            self._meet("checkpoint")
            resuming.add_positions(checkpoint, self._workers())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint and, to resume training, this worker's position in it."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn == TrainerFn.FITTING and not self.serves:
            self._resumed = resuming.take_position(loaded, self.global_rank, self.world_size)
        return loaded
