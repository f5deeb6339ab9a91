"""Eight workers in one process: compare algorithms before you book the machines.

What it shows: the simulation runs the algorithms of a real run and computes the same numbers, on a
virtual clock: how long they would take at 100 local steps per second and over links of 1 Mbit/s,
and for which part of that time workers would compute. The workers disagree on purpose, since each
sees another part of the plane. "one alone" is a worker that never communicates.

Run it: python examples/04_compare_in_simulation.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco import DiLoCo, GASLoC, Link, LocalSGD, Simulation
from lightning_loco.algorithms import Algorithm

WORKERS, SYNC_EVERY, ROUNDS = 8, 10, 40


@dataclass
class Row:
    """One line of the table."""

    label: str
    algorithm: Algorithm
    overlap: bool = False
    topology: Any = None
    workers: int = WORKERS


ROWS = [
    Row("one alone", LocalSGD(), workers=1),
    Row("Local SGD", LocalSGD()),
    Row("DiLoCo", DiLoCo()),
    Row("Async DiLoCo", DiLoCo(outer_momentum=0.0), overlap=True),
    Row("GASLoC, ring", GASLoC(), topology="ring"),
    Row("GASLoC, random pairs", GASLoC(), topology="random_matching"),
]


def surface(points: Tensor) -> Tensor:
    """Height of a wavy surface over points of the plane."""
    return (points[:, :1] * 2).sin() * points[:, 1:].cos()


def run(row: Row) -> tuple[float, float, float, float]:
    """Loss of the consensus on the whole plane, consensus distance, seconds, utilisation."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(row.workers)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    simulation = Simulation(
        models,
        row.algorithm,
        sync_every=SYNC_EVERY,
        overlap=row.overlap,
        topology=row.topology,
        speeds=[100.0] * row.workers,
        links=Link(mbit_per_s=1, latency_s=0.005),
    )

    def local_step(worker: int) -> None:
        points = torch.rand(32, 2) * 4 - 2
        points[:, 0] = -2 + (worker + points[:, 0] / 4 + 0.5) * 4 / WORKERS  # its own strip
        optimizers[worker].zero_grad()
        nn.functional.mse_loss(models[worker](points), surface(points)).backward()
        optimizers[worker].step()

    simulation.run(local_step, num_rounds=ROUNDS)
    simulation.drain()
    distance = simulation.consensus_distance()
    parameters = list(models[0].parameters())
    plane = torch.rand(4000, 2, generator=torch.Generator().manual_seed(1)) * 4 - 2
    with torch.no_grad():
        for p, part in zip(
            parameters, simulation.consensus().split([p.numel() for p in parameters]), strict=True
        ):
            p.copy_(part.view_as(p))
        loss = nn.functional.mse_loss(models[0](plane), surface(plane))
    utilisation = sum(costs.utilisation for costs in simulation.costs) / row.workers
    return loss.item(), distance, max(simulation.time_s), utilisation


def main() -> None:
    torch.set_num_threads(1)
    print(f"{WORKERS} workers, {ROUNDS} rounds of {SYNC_EVERY} local steps")
    print(f"{'':<22}{'loss':>8}{'consensus distance':>22}{'seconds':>10}{'utilisation':>14}")
    for row in ROWS:
        loss, distance, seconds, utilisation = run(row)
        print(f"{row.label:<22}{loss:>8.4f}{distance:>22.4f}{seconds:>10.2f}{utilisation:>14.0%}")


if __name__ == "__main__":
    main()
