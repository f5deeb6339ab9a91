"""lightning_loco: DiLoCo with blocking rounds, in float32 or compressed."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from libraries.library import InRounds, Job, Line, join_process_group
from lightning_loco import DiLoCo, StepEngine


class Ours(InRounds):
    """An engine that is called after every local step."""

    def __init__(self, job: Job, line: Line, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model)
        join_process_group(job, line)
        self._optimizer = optimizer
        self._engine = StepEngine(
            model,
            DiLoCo(job.outer_lr, job.outer_momentum),
            sync_every=job.sync_every,
            compression=job.entry.partition("_")[2] or None,
        )

    def step(self, loss: float) -> None:
        """The local step, and what the engine makes of it."""
        self._optimizer.step()
        self._engine.step()

    def close(self) -> None:
        """Destroy the process groups."""
        self._engine.close()
