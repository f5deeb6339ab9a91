"""Runs that need no other library: workers alone, this package, and PyTorch's own methods."""

from __future__ import annotations

from harness import Worker
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from libraries.library import Job, Library
from lightning_loco import DiLoCo, StepEngine


class Alone(Library):
    """Workers that do not exchange: the local steps that all others are compared with."""

    needs_group = False


class Ours(Library):
    """DiLoCo of this package with blocking rounds, in float32 or compressed."""

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, model, optimizer)
        self._engine = StepEngine(
            model,
            DiLoCo(job.outer_lr, job.outer_momentum),
            sync_every=job.sync_every,
            compression=job.entry.partition("_")[2] or None,
        )

    def step(self, loss: float) -> None:
        """Take the local step, and run the round if one is due."""
        self.optimizer.step()
        self._engine.step()

    def close(self) -> None:
        """Destroy the process groups."""
        self._engine.close()


class TorchDDP(Library):
    """DistributedDataParallel, which averages gradients in every backward pass."""

    every_step = True

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, DistributedDataParallel(model), optimizer)


class TorchPostLocalSGD(Library):
    """DDP whose hook sends no gradients, and a mean of parameters in rounds.

    It has no outer optimizer, so its loss is Local SGD's. The averager counts from 0 and
    averages when ``(step - warmup_steps) % period`` is 0, so with ``warmup_steps=0`` it would
    average after the first local step and never after the last; with ``period - 1`` its rounds are
    at the same steps as the others'.
    """

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        module = DistributedDataParallel(model)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=0,
            post_local_gradient_allreduce=False,
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=job.sync_every, warmup_steps=job.sync_every - 1)
        super().__init__(job, worker, module, PostLocalSGDOptimizer(optimizer, averager))
