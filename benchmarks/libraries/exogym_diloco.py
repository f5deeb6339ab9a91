"""exogym's DiLoCoStrategy, called as its own training node calls it.

Only the strategy is taken, so what its Trainer adds (a barrier in every step, and the interface
``lo0``, which Linux does not have) costs it nothing here. Its first phase has one local step more
than the others, and it gets a step more for that. On a CPU its master model shares memory with the
first worker's model after the first round, which it does not with a GPU; its loss shows that.
"""

from __future__ import annotations

import torch
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.optim import OptimSpec
from harness import Worker
from torch import nn
from torch.optim import Optimizer

from libraries.library import Job, Library


class ExogymDiLoCo(Library):
    """The strategy with our optimizer inside."""

    extra_steps = 1

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, model, optimizer)
        outer = OptimSpec(
            torch.optim.SGD, lr=job.outer_lr, momentum=job.outer_momentum, nesterov=True
        )
        self._strategy = DiLoCoStrategy(
            optim_spec=OptimSpec(lambda parameters: optimizer),
            outer_optim_spec=outer,
            H=job.sync_every,
        )
        self._strategy._init_node(model, worker.rank, worker.num_workers)

    def step(self, loss: float) -> None:
        """The local step, and the round if one is due."""
        self._strategy.step()
