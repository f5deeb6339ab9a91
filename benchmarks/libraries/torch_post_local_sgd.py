"""PyTorch's post-local SGD: DDP whose hook sends no gradients, and parameters averaged in rounds.

It is a plain mean of parameters, without an outer optimizer, so its loss is that of Local SGD. The
averager counts from 0 and averages when ``(step - warmup_steps) % period`` is 0, so with
``warmup_steps=0`` it would average after the first local step and never after the last; with
``period - 1`` its rounds are those of all others here.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from libraries.library import Job, Line, join_process_group


class TorchPostLocalSGD:
    """Local from the first step on, also within a machine."""

    extra_steps = 0
    every_step = False

    def __init__(self, job: Job, line: Line, model: nn.Module, optimizer: Optimizer) -> None:
        join_process_group(job, line)
        module = DistributedDataParallel(model)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=0,
            post_local_gradient_allreduce=False,
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=job.sync_every, warmup_steps=job.sync_every - 1)
        self.module: nn.Module = module
        self._optimizer = PostLocalSGDOptimizer(optimizer, averager)

    def step(self, loss: float) -> None:
        """The local step, and the mean when the averager's period is over."""
        self._optimizer.step()

    def close(self) -> None:
        """Nothing: the process ends."""
