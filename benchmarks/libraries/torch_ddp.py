"""PyTorch's DistributedDataParallel: gradients are averaged in every backward pass."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from libraries.library import Job, Line, join_process_group


class TorchDDP:
    """DDP with its defaults."""

    extra_steps = 0
    every_step = True

    def __init__(self, job: Job, line: Line, model: nn.Module, optimizer: Optimizer) -> None:
        join_process_group(job, line)
        self._optimizer = optimizer
        self.module: nn.Module = DistributedDataParallel(model)

    def step(self, loss: float) -> None:
        """The step; the gradients are those of all workers already."""
        self._optimizer.step()

    def close(self) -> None:
        """Nothing: the process ends."""
