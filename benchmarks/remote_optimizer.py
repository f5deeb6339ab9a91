"""What a step costs when the optimizer is on another rank: 2 workers and 1 server.

Measured: seconds of one step after the gradients are there, of all workers together:

  raw    P numbers from each worker to the server and back in one message each, nothing computed
  ours   RemoteOptimizer and aggregator_optimizer, with torch.optim.SGD
  naive  one blocking message per parameter, as in the reference of the method; the same SGD

in changing order, in the same processes with one thread each, over gloo.

How to read it: ``ours/raw`` is the median of the ratios of turns next to each other and should be
at most 1.5; ``naive/ours`` should be at least 2. The server's sum and step are part of both.

Counted, in units of the parameters in float32 (4 P bytes): what a worker sends and receives in a
step, each at most 1.01, and the most that torch holds on the server beside the parameters, with
momentum: one vector for the mean gradient, one for the momentum, and the messages under way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import harness
import torch
import torch.distributed as dist
from harness import Worker, at_least, at_most, ms, ratios, spread
from memory import highest_rise
from torch import Tensor, nn

from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.parameter_server import RemoteOptimizer, Tiers, serve

NUM_WORKERS = 2
AHEAD_BYTES = 16 * 2**20  # of messages under way on the server, for each worker but the first
BOUND_BYTES = 1.01
SERVER = NUM_WORKERS
BOUND_RAW = 1.5
BOUND_NAIVE = 2.0


def make_params(numel: int) -> list[Tensor]:
    """The demo's parameters, or many layers with this number of parameters in all."""
    if numel == 0:
        return list(ByteGPT().parameters())
    width = 1024
    layers = max(numel // (width * (width + 1)), 1)
    return [p for _ in range(layers) for p in nn.Linear(width, width).parameters()]


def time_turns(worker: Worker, numel: int, turns: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of every turn."""
    params = make_params(numel)
    for param in params:
        param.grad = torch.ones_like(param)

    def timed(run: Callable[[Worker, list[Tensor], int], float]) -> float:
        with worker.process_group():
            return run(worker, params, steps)

    return harness.in_turns({name: partial(timed, run) for name, run in KINDS.items()}, turns)


def timed(step: Callable[[], object], steps: int) -> float:
    """Seconds per step, after a first one; the messages keep all ranks together."""
    step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def run_raw(worker: Worker, params: list[Tensor], steps: int) -> float:
    """Move the bytes."""
    flat = torch.ones(sum(param.numel() for param in params))
    inboxes = [torch.empty_like(flat) for _ in range(NUM_WORKERS)]

    def work() -> None:
        dist.send(flat, SERVER)
        dist.recv(flat, SERVER)

    def serve() -> None:
        for move in (dist.irecv, dist.isend):
            for waiting in [move(inboxes[rank], rank) for rank in range(NUM_WORKERS)]:
                waiting.wait()

    return timed(serve if worker.rank == SERVER else work, steps)


def run_ours(worker: Worker, params: list[Tensor], steps: int) -> float:
    """The package."""
    if worker.rank == SERVER:
        serve(params, lambda p: torch.optim.SGD(p, lr=1e-6), Tiers(NUM_WORKERS, 2), SERVER)
        return 0.0
    remote = RemoteOptimizer(params, SERVER)
    remote.receive_weights()
    seconds = timed(remote.step, steps)
    remote.leave()
    return seconds


def count(worker: Worker, numel: int, steps: int) -> tuple[float, float, float]:
    """Bytes sent and received per step of a worker, and the highest rise of a server's memory."""
    params = make_params(numel)
    tiers = Tiers(NUM_WORKERS, 2)
    with worker.process_group():
        if worker.rank == SERVER:
            optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9)
            return 0.0, 0.0, highest_rise(lambda: serve(params, lambda _: optimizer, tiers, SERVER))
        for param in params:
            param.grad = torch.ones_like(param)
        remote = RemoteOptimizer(params, SERVER)
        remote.receive_weights()
        sent, received = remote.bytes_sent, remote.bytes_received
        for _ in range(steps):
            remote.step()
        sent, received = remote.bytes_sent - sent, remote.bytes_received - received
        remote.leave()
        return sent / steps, received / steps, 0.0


def run_naive(worker: Worker, params: list[Tensor], steps: int) -> float:
    """One blocking message per parameter."""
    optimizer = torch.optim.SGD(params, lr=1e-6)

    def work() -> None:
        for param in params:
            assert param.grad is not None
            dist.send(param.grad, SERVER)
        for param in params:
            dist.recv(param.data, SERVER)

    def serve() -> None:
        for param in params:
            total = torch.zeros_like(param)
            received = torch.empty_like(param)
            for rank in range(NUM_WORKERS):
                dist.recv(received, rank)
                total += received
            param.grad = total / NUM_WORKERS
        optimizer.step()
        for rank in range(NUM_WORKERS):
            for param in params:
                dist.send(param.data, rank)

    return timed(serve if worker.rank == SERVER else work, steps)


KINDS = {"raw": run_raw, "ours": run_ours, "naive": run_naive}


def main() -> None:
    options = harness.parse(__doc__, turns=9, steps=5, quick={"turns": 2, "steps": 2})
    rows, counts = [], []
    for name, numel in {"demo": 0, "50M": 50_000_000}.items():
        if numel and options.quick:
            continue
        settings = (numel, options.turns, options.steps)
        seconds = harness.run_workers(time_turns, NUM_WORKERS + 1, *settings)[0]
        raw = ratios(seconds["ours"], seconds["raw"])
        naive = ratios(seconds["naive"], seconds["ours"])
        row = [name, *(ms(seconds[kind]) for kind in KINDS)]
        row += [spread(raw), at_most(statistics.median(raw), BOUND_RAW)]
        rows.append([*row, spread(naive), at_least(statistics.median(naive), BOUND_NAIVE)])

        size = 4.0 * sum(param.numel() for param in make_params(numel))
        first, *_, server = harness.run_workers(count, NUM_WORKERS + 1, numel, 3)
        sent, received, memory = first[0] / size, first[1] / size, server[2] / size
        bound = 2 + (NUM_WORKERS - 1) * min(AHEAD_BYTES, size) / size + 0.01
        row = [name, f"{sent:.4f}", f"{received:.4f}", at_most(max(sent, received), BOUND_BYTES)]
        counts.append([*row, f"{memory:.2f}", at_most(memory, bound)])
        print(f"done: {name}", flush=True)
    header = ["one step", *(f"{kind} ms" for kind in KINDS)]
    harness.print_table([*header, "ours/raw", "bound", "naive/ours", "bound"], rows)
    header = ["one step, in 4 P bytes", "sent", "received", "bound", "server memory", "bound"]
    harness.print_table(header, counts)


if __name__ == "__main__":
    main()
