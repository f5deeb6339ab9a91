"""Quadratics with a minimum for each worker, for methods with a round after every local step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_loco import Simulation
from lightning_loco.algorithms import Algorithm
from tests.algorithms.toys import Point, randn

NUMEL = 22  # not a multiple of a block
RATE = 0.2

targets = randn(8, NUMEL, seed=1)
curvatures = 0.5 + randn(8, NUMEL, seed=2).abs() / 3
start = randn(NUMEL, seed=3)


def gradient(x: Tensor) -> Tensor:
    """The gradients ``(N, P)`` of all workers at ``x``, ``(N, P)``."""
    return curvatures[: len(x)] * (x - targets[: len(x)])


def trained(
    algorithm: Algorithm, num_workers: int, rounds: int, **settings: Any
) -> tuple[Tensor, Simulation]:
    """Gradient descent with a round after every step.

    Returns the parameters of all workers after each round, ``(rounds, N, P)``.
    """
    models = [Point(start) for _ in range(num_workers)]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.sub_(RATE * curvatures[worker] * (value - targets[worker]))

    return _run(models, local_step, algorithm, rounds, settings)


def gossiped(
    algorithm: Algorithm, values: Tensor, rounds: int, **settings: Any
) -> tuple[Tensor, Simulation]:
    """Gossip without local steps, from ``values``, ``(N, P)``: one step leads there at first."""
    models = [Point(torch.zeros_like(values[0])) for _ in values]
    waiting = set(range(len(values)))

    def local_step(worker: int) -> None:
        if worker in waiting:
            waiting.remove(worker)
            models[worker].value.data.copy_(values[worker])

    return _run(models, local_step, algorithm, rounds, settings)


def _run(
    models: list[Point],
    local_step: Callable[[int], None],
    algorithm: Algorithm,
    rounds: int,
    settings: dict[str, Any],
) -> tuple[Tensor, Simulation]:
    simulation = Simulation(models, algorithm, sync_every=1, **settings)
    history = []
    for _ in range(rounds):
        simulation.run(local_step, num_rounds=1)
        history.append(torch.stack(simulation.params()))
    return torch.stack(history), simulation


def distance(x: Tensor) -> float:
    """The consensus distance of ``(N, P)``."""
    return float((x - x.mean(0)).square().sum(1).mean().sqrt())
