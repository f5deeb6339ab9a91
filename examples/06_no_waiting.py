"""No worker waits for a slow one: the models are averaged by the clock, while training continues.

What it shows: worker 1 is ten times slower than worker 0. With DDP worker 0 would wait for it in
every step. With asynchronous model averaging worker 0 makes its 200 steps at its own pace, worker 1
its 20, and the model at the end is the mean of both. The script is plain PyTorch; with Lightning it
is Trainer(strategy=loco.AsyncModelAverageStrategy(interval_s=0.1)).

Run it: torchrun --nproc-per-node=2 examples/06_no_waiting.py
Or let it start its two workers itself: python examples/06_no_waiting.py
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import lightning_loco as loco

SECONDS_PER_STEP = {0: 0.01, 1: 0.1}
TARGET = torch.tensor([[1.0, -2.0]])


def train() -> None:
    """One worker, inside a process group."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other data on every worker
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = loco.ClockEngine(model, interval_s=0.1)
    began = time.perf_counter()
    for _ in range(int(2 / SECONDS_PER_STEP[rank])):
        time.sleep(SECONDS_PER_STEP[rank])
        inputs = torch.randn(8, 2)
        loss = (model(inputs) - inputs @ TARGET.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.step()
    seconds = time.perf_counter() - began
    cost = engine.statistics
    print(
        f"worker {rank}: {engine.worker.steps} local steps in {seconds:.1f} s, of which it waited "
        f"{cost.wait_s:.1f} s; {cost.rounds} rounds"
    )
    engine.finish()
    if rank == 0:
        print(f"distance to the target: {(model.weight.detach() - TARGET).norm():.3f}")
    engine.close()


def start(rank: int, init_method: str) -> None:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    train()
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(start, (f"file://{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
