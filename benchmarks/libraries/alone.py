"""No library at all: the local steps that all others are compared with."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from libraries.library import InRounds, Job, Line


class Alone(InRounds):
    """Every worker for itself."""

    def __init__(self, job: Job, line: Line, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model)
        self._optimizer = optimizer

    def step(self, loss: float) -> None:
        """The local step."""
        self._optimizer.step()
