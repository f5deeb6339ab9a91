"""DiLoCo in a plain PyTorch loop: no Trainer, no LightningModule.

What it shows: the engine needs a module and an algorithm. Call step() after each optimizer step and
finish() at the end; it runs the rounds, and leaves the consensus in the module on every worker.

Run it: torchrun --nproc-per-node=2 examples/03_plain_pytorch.py
Or let it start its two workers itself: python examples/03_plain_pytorch.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco import DiLoCo, StepEngine


def surface(points: Tensor) -> Tensor:
    """Height of a wavy surface over points of the plane."""
    return (points[:, :1] * 2).sin() * points[:, 1:].cos()


def train(worker: int, num_workers: int) -> None:
    """One worker, inside a process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = StepEngine(model, DiLoCo(), sync_every=10)

    generator = torch.Generator().manual_seed(1 + worker)  # every worker draws its own data
    for _ in range(300):
        inputs = torch.rand(32, 2, generator=generator) * 4 - 2
        loss = nn.functional.mse_loss(model(inputs), surface(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.step()
    engine.finish()

    if worker == 0:
        held_out = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(held_out), surface(held_out))
        print(
            f"loss {loss:.4f} of the consensus of {num_workers} workers "
            f"after {engine.worker.steps} local steps and {engine.statistics.rounds} rounds"
        )
    engine.close()


def start(rank: int, store: str) -> None:
    """The program of a process that this file has started."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(rank, 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(start, args=(f"{folder}/store",), nprocs=2)
