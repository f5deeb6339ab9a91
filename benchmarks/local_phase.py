"""A model of layers of one size, and local steps that are sleeps, as if a GPU computed."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_loco import StepEngine

SYNC_EVERY = 5


def make_model(width: int) -> nn.Module:
    """20 layers of ``width x width``, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(20)))


def shard(model: nn.Module, num_ranks: int, size: int) -> None:
    """Shard every layer over the ``size`` ranks of a worker."""
    ranks = torch.arange(num_ranks).view(-1, size)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("worker", "data_parallel"))["data_parallel"]
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh)


def make_round(engine: StepEngine, phase_s: float) -> float:
    """Local steps of so many seconds in all, and then the seconds of a round."""
    for _ in range(SYNC_EVERY - 1):
        time.sleep(phase_s / SYNC_EVERY)
        engine.step()
    time.sleep(phase_s / SYNC_EVERY)
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started
