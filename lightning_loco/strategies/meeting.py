"""Lightning's own collectives as meetings: who arrives early goes on serving the others' rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_loco.rounds.engine import StopAgreed


class Meets(Protocol):
    """Whatever brings all workers to the same place."""

    @property
    def stop_agreed(self) -> str | None:
        """Why all stop now."""

    def meet(self, purpose: str) -> object:
        """Wait until all workers have come; may raise ``StopAgreed``."""


class MeetingStrategy(DDPStrategy):
    """A ``DDPStrategy`` whose collectives never meet a round of another worker by mistake.

    Workers that have different numbers of batches reach Lightning's barriers and reductions at
    different times. Each of these calls first waits, through the engine, until all workers have
    come to the same one; rounds of those still training are served meanwhile.
    """

    engine: Meets | None = None
    _finished = False

    @property
    def num_workers(self) -> int:
        """Number of independently moving copies of the model."""
        return self.world_size

    @property
    def worker(self) -> int:
        """Number of this process' copy of the model."""
        return self.global_rank

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_alone(self) -> bool:
        """Whether this worker has failed by itself, so that nobody else will come."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return interrupted and (self.engine is None or self.engine.stop_agreed is None)

    @property
    def _is_training(self) -> bool:
        """Whether rounds may be going on."""
        return self.engine is not None and not self._finished and not self._is_alone

    def _meet(self, purpose: str) -> None:
        if self._is_training:
            assert self.engine is not None
            try:
                self.engine.meet(purpose)
            except StopAgreed as stop:
                raise SIGTERMException from stop

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; older versions of Lightning know no ``weights_only``."""
        if weights_only is None:
            return super().load_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        self._meet(f"barrier {args[0] if args else kwargs.get('name', '')}")
        if not self._is_alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one worker to all."""
        self._meet("broadcast")
        return obj if self._is_alone else super().broadcast(obj, src)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over all workers."""
        if not isinstance(tensor, Tensor):
            return tensor
        self._meet("reduce")
        return tensor if self._is_alone else super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Collect a tensor from all workers."""
        self._meet("all_gather")
        return tensor if self._is_alone else super().all_gather(tensor, group, sync_grads)
