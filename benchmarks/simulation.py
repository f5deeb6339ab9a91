"""What the simulation costs beside the local steps, and what costs without training take.

  plain        local steps of all workers, one after the other, and nothing else
  simulated    the same in Simulation: DiLoCo or GASLoC on two data centres, with jitter
  costs        lightning_loco.costs.estimate of random matchings of 100,000 workers with 100 billion
               parameters: seconds, and the most memory that this process took until then

How to read it: plain and simulated runs alternate, so that both have the same machine; each number
is the median of the processor's seconds of this process. The simulation should take at most 1.3
times as long as the local steps alone, and the costs at most 10 s and 2 GB.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable

import torch
from common import against, make_parser, print_machine, print_table
from torch import nn

from lightning_loco import DiLoCo, GASLoC, Simulation
from lightning_loco.algorithms import Algorithm
from lightning_loco.costs import StepTimes, as_method, estimate
from lightning_loco.links import LinkTimes, as_links
from lightning_loco.topology import RandomMatching

WIDTH, BATCH = 224, 8
BOUND, BOUND_COSTS_S, BOUND_COSTS_GB = 1.3, 10.0, 2.0
METHODS: dict[str, Callable[[], Algorithm]] = {"diloco": DiLoCo, "gasloc": GASLoC}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is simulated."""

    workers: int = 64
    steps: int = 1000
    every: int = 50
    repeats: int = 3
    cost_workers: int = 100_000


class Workers:
    """Models of about 0.1 million parameters, with their optimizers and batches."""

    def __init__(self, num_workers: int) -> None:
        torch.manual_seed(0)
        self.models = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(num_workers)
        ]
        self._optimizers = [torch.optim.AdamW(model.parameters()) for model in self.models]
        self._inputs = torch.randn(num_workers, BATCH, WIDTH)

    def local_step(self, worker: int) -> None:
        """Make one step of a worker."""
        loss = self.models[worker](self._inputs[worker]).square().mean()
        self.models[worker].zero_grad()
        loss.backward()
        self._optimizers[worker].step()


def plain(size: Size) -> float:
    """Seconds of the local steps alone."""
    workers = Workers(size.workers)
    began = time.process_time()
    for _ in range(size.steps):
        for worker in range(size.workers):
            workers.local_step(worker)
    return time.process_time() - began


def simulated(size: Size, method: str) -> float:
    """Seconds of the simulation of as many."""
    workers = Workers(size.workers)
    began = time.process_time()
    simulation = Simulation(
        workers.models,
        METHODS[method](),
        sync_every=size.every,
        speeds=[10.0] * size.workers,
        jitter=0.1,
        links="two_datacentres",
    )
    simulation.run(workers.local_step, size.steps // size.every)
    return time.process_time() - began


def costs(size: Size) -> tuple[float, float]:
    """Seconds, and the most gigabytes of memory, of costs without training."""
    began, n = time.process_time(), size.cost_workers
    links = as_links("two_datacentres")
    assert links is not None
    method = as_method("noloco", 100, RandomMatching())
    steps = StepTimes.of_spread(n, step_s=2.0, spread=0.2, jitter=0.1)
    estimate(method, 100_000_000_000, steps, LinkTimes(links, n))
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return time.process_time() - began, peak_gb


def main() -> None:
    asked = make_parser(__doc__).parse_args()
    size = Size(4, 20, 10, 1, 1000) if asked.quick else Size()
    torch.set_num_threads(1)
    print_machine()
    took_s, peak_gb = costs(size)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *METHODS)}
    for _ in range(size.repeats):
        seconds["plain"].append(plain(size))
        for method in METHODS:
            seconds[method].append(simulated(size, method))
    base, *_ = medians = [statistics.median(measured) for measured in seconds.values()]
    rows = []
    for name, found in zip(seconds, medians, strict=True):
        bound = "" if name == "plain" else against(found / base, BOUND)
        rows.append((name, f"{found:.2f}", f"{found / base:.2f}", bound))
    print_table(("", "processor s", "of plain", "bound"), rows)
    bounds = against(took_s, BOUND_COSTS_S), against(peak_gb, BOUND_COSTS_GB)
    print_table(
        ("", "processor s", "bound", "GB", "bound"),
        [
            (
                f"costs, {size.cost_workers:,} workers",
                f"{took_s:.2f}",
                bounds[0],
                f"{peak_gb:.2f}",
                bounds[1],
            )
        ],
    )


if __name__ == "__main__":
    main()
