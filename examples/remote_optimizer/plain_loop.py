"""A remote optimizer in a plain PyTorch loop: workers compute gradients, other ranks take the step.

What it shows: every rank calls run_role, which trains or serves depending on the rank. The training
loop is the usual one with a RemoteOptimizer, including a scheduler and clipping. The number of
processes determines the number of tiers; results are the same with 2 and 3 tiers.

Run it, 2 workers and 2 tiers: torchrun --nproc-per-node=3 examples/remote_optimizer/plain_loop.py
The same with 3 tiers: torchrun --nproc-per-node=4 examples/remote_optimizer/plain_loop.py
With another number of workers: append the number, and start one or two processes more than that.
"""

import functools
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco.parameter_server import RemoteOptimizer, Tiers, run_role

STEPS = 300


def surface(points: Tensor) -> Tensor:
    """Return the height of a wavy surface at points of the plane."""
    return (points[:, :1] * 2).sin() * points[:, 1:].cos()


def train(model: nn.Module, remote: RemoteOptimizer) -> list[float]:
    """Train on a worker; return its losses."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(remote, STEPS)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # each worker has its own data
    losses = []
    for _ in range(STEPS):
        inputs = torch.rand(32, 2, generator=generator) * 4 - 2
        loss = nn.functional.mse_loss(model(inputs), surface(inputs))
        remote.zero_grad()
        remote.expect_backward()  # send gradients while the next line computes them
        loss.backward()
        remote.clip_grad_norm_(1.0)  # clips the mean gradient, where the optimizer is
        remote.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tiers = Tiers.detect(world_size, num_workers)
    if rank == 0:
        names = ", ".join(tiers.name(rank) for rank in range(world_size))
        print(f"{tiers.num_tiers} tiers: {names}", flush=True)

    torch.manual_seed(0)  # workers start from the parameters of the optimizer in any case
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    losses = run_role(functools.partial(train, model), model.parameters(), adamw, num_workers)

    own = torch.cat([param.detach().flatten() for param in model.parameters()])
    params_of_ranks = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(params_of_ranks, own)
    if losses is not None and rank == 0:
        first, last = (sum(part) / len(part) for part in (losses[:20], losses[-20:]))
        equal = all(torch.equal(own, other) for other in params_of_ranks[:num_workers])
        print(f"loss {first:.4f} at first, {last:.4f} after {STEPS} steps")
        print(f"all {num_workers} workers have the same parameters: {'yes' if equal else 'no'}")
        print(f"sum of the parameters: {own.double().sum():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
