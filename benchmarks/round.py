"""What a blocking round of DiLoCo costs, against rounds written by hand.

Measured: the seconds from a common barrier until the last worker is done, for four variants that
follow each other within every repetition, in random order, on the same parameters (a GPT's list of
tensors) and with the same drift. Each has its own process group, as the engine has, because a
connection that was used a moment ago is faster. There are no local steps.

  raw      one all-reduce of a flat vector of the same bytes, and nothing else
  fused    the best short hand-written round: foreach pack into a kept buffer, subtract in place,
           one all-reduce, divide, fused torch.optim.SGD with Nesterov momentum, foreach unpack
  naive    the usual hand-written round: cat, subtract, all-reduce, tensor expressions, copy loop
  ours     StepEngine(model, DiLoCo(), sync_every=1).step(), with its agreement between workers,
           its check for NaN, its chunks and its statistics

At the end the three rounds must have led to the same parameters.

How to read it: times are medians over the repetitions. A ratio is the median of the ratios within
a repetition, with its quartiles in brackets. ours/fused should be at most 1.1 and ours/naive at
most 0.7 (1.1 on a GPU, which hides what is naive); ours/raw and fused/naive have no bound. Use an
idle machine with at least as many cores as workers, or read the ratios only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import harness
import torch
import torch.distributed as dist
from harness import Worker, at_most, ms, ratios, spread
from torch import Tensor, nn

from lightning_loco import DiLoCo, StepEngine

# name: (layers, width, rows of the embedding, repetitions)
MODELS = {"1M": (5, 128, 256, 200), "5M": (6, 256, 512, 60), "50M": (8, 640, 16384, 10)}
LR, MOMENTUM = 0.7, 0.9
NUM_WARM_UP = 3
BOUND_FUSED = 1.1
BOUND_NAIVE = {"cpu": 0.7, "cuda": 1.1}


class Shapes(nn.Module):
    """The parameters of a GPT, with biases, and nothing else; equal on all workers."""

    def __init__(self, layers: int, width: int, rows: int) -> None:
        super().__init__()
        block: list[tuple[int, ...]] = [
            *[(width,), (width,)],
            *[(3 * width, width), (3 * width,), (width, width), (width,)],
            *[(width,), (width,)],
            *[(4 * width, width), (4 * width,), (width, 4 * width), (width,)],
        ]
        shapes = [(rows, width), (256, width), *(block * layers), (width,), (width,)]
        generator = torch.Generator().manual_seed(0)
        self.tensors = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)


def make_raw(params: list[Tensor]) -> Callable[[], None]:
    """One all-reduce of the same number of bytes."""
    flat = torch.zeros(sum(p.numel() for p in params), device=params[0].device)
    group = dist.new_group()

    def run() -> None:
        dist.all_reduce(flat, group=group)

    return run


def make_fused(params: list[Tensor]) -> Callable[[], None]:
    """The hand-written round that makes as few passes over memory as plain torch allows."""
    sizes = [p.numel() for p in params]
    outer = nn.Parameter(torch.cat([p.reshape(-1) for p in params]))
    flat = torch.empty_like(outer, requires_grad=False)
    group = dist.new_group()
    optimizer = torch.optim.SGD([outer], lr=LR, momentum=MOMENTUM, nesterov=True, fused=True)
    parts, outer_parts = (
        [part.view_as(p) for part, p in zip(vector.split(sizes), params, strict=True)]
        for vector in (flat, outer.detach())
    )

    def run() -> None:
        torch._foreach_copy_(parts, params)
        torch.sub(outer.detach(), flat, out=flat)
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size())
        outer.grad = flat
        optimizer.step()
        torch._foreach_copy_(params, outer_parts)

    return run


def make_naive(params: list[Tensor]) -> Callable[[], None]:
    """The hand-written round as one would first write it."""
    outer = torch.cat([p.reshape(-1) for p in params])
    momentum = torch.zeros_like(outer)
    group = dist.new_group()

    def run() -> None:
        nonlocal outer, momentum
        gradient = outer - torch.cat([p.reshape(-1) for p in params])
        dist.all_reduce(gradient, group=group)
        gradient = gradient / dist.get_world_size()
        momentum = MOMENTUM * momentum + gradient
        outer = outer - LR * (gradient + MOMENTUM * momentum)
        position = 0
        for p in params:
            p.copy_(outer[position : position + p.numel()].view_as(p))
            position += p.numel()

    return run


@torch.no_grad()
def time_rounds(
    worker: Worker, size: tuple[int, int, int], repetitions: int
) -> dict[str, list[float]]:
    """Seconds of this worker in every round of every variant."""
    with worker.process_group():
        model = Shapes(*size).to(worker.device)
        params = [p.detach() for p in model.parameters()]
        generator = torch.Generator().manual_seed(1 + worker.rank)
        local = [p + 0.01 * torch.randn(p.shape, generator=generator).to(p) for p in params]
        engine = StepEngine(model, DiLoCo(LR, MOMENTUM), sync_every=1)
        rounds: dict[str, Callable[[], object]] = {
            "raw": make_raw(params),
            "fused": make_fused(params),
            "naive": make_naive(params),
            "ours": engine.step,
        }
        samples: dict[str, Tensor] = {}

        def timed(name: str) -> float:
            torch._foreach_copy_(params, local)
            worker.wait_for_device()
            worker.wait_for_all()
            started = time.perf_counter()
            rounds[name]()
            worker.wait_for_device()
            seconds = time.perf_counter() - started
            samples[name] = torch.cat([p.reshape(-1)[:1000] for p in params])
            return seconds

        kinds = {name: partial(timed, name) for name in rounds}
        found = harness.in_turns(kinds, repetitions, NUM_WARM_UP)
        for name in ("naive", "ours"):
            torch.testing.assert_close(samples[name], samples["fused"], rtol=1e-4, atol=1e-4)
        engine.close()
    return found


def main() -> None:
    options = harness.parse(
        __doc__,
        models=list(MODELS),
        workers=[2, 4],
        repetitions=0,  # those of the table above
        quick={"models": ["1M"], "workers": [2], "repetitions": 5},
        choices={"models": MODELS},
        device="cpu",
    )
    rows = []
    for name in options.models:
        *size, repetitions = MODELS[name]
        for n in options.workers:
            settings = (tuple(size), options.repetitions or repetitions)
            results = harness.run_workers(time_rounds, n, *settings, device=options.device)
            seconds = harness.slowest(results)
            to = {kind: ratios(seconds["ours"], seconds[kind]) for kind in seconds}
            naive_bound = BOUND_NAIVE[options.device]
            row = [f"{name}, {len(list(Shapes(*size).parameters()))} tensors, {n} workers"]
            row += [ms(seconds[kind]) for kind in ("raw", "fused", "naive", "ours")]
            row += [spread(to["fused"]), at_most(statistics.median(to["fused"]), BOUND_FUSED)]
            row += [spread(to["naive"]), at_most(statistics.median(to["naive"]), naive_bound)]
            row += [spread(to["raw"]), spread(ratios(seconds["fused"], seconds["naive"]))]
            rows.append(row)
            print(f"done: {row[0]}", flush=True)
    header = ["one round", "raw ms", "fused ms", "naive ms", "ours ms", "ours/fused", "bound"]
    harness.print_table([*header, "ours/naive", "bound", "ours/raw", "fused/naive"], rows)


if __name__ == "__main__":
    main()
