"""Baselines of gossip after every local step of SGD equal their papers' formulas in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gossip_baselines import A2CiD2, ChocoSGD, Int4Differences
from lightning_loco import NeighborAverage, Simulation
from lightning_loco.algorithms import Algorithm
from lightning_loco.compression import Codec, Int8
from lightning_loco.topology import RandomMatching, Ring
from tests.harness.toys import Point, assert_close, randn, states_of

NUMEL = 22  # not a multiple of a block
RATE = 0.2
MATRIX = Ring().mixing_matrix(5)

# Each worker's quadratic has its own minimum.
targets = randn(8, NUMEL, seed=1)
curvatures = 0.5 + randn(8, NUMEL, seed=2).abs() / 3
start = randn(NUMEL, seed=3)


def gradient(x: Tensor) -> Tensor:
    """Return the gradients ``(N, P)`` of all workers at ``x``, ``(N, P)``."""
    return curvatures[: len(x)] * (x - targets[: len(x)])


def trained(
    algorithm: Algorithm, num_workers: int, rounds: int, **settings: Any
) -> tuple[Tensor, Simulation]:
    """Run gradient descent with a round after every step.

    Returns the parameters of all workers after each round, ``(rounds, N, P)``.
    """
    models = [Point(start) for _ in range(num_workers)]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.sub_(RATE * curvatures[worker] * (value - targets[worker]))

    simulation = Simulation(models, algorithm, sync_every=1, **settings)
    history = []
    for _ in range(rounds):
        simulation.run(local_step, num_rounds=1)
        history.append(torch.stack(simulation.params()))
    return torch.stack(history), simulation


def test_blocking_rounds_average_after_the_step() -> None:
    x, history = start.repeat(5, 1), []
    for _ in range(20):
        x = MATRIX @ (x - RATE * gradient(x))
        history.append(x)
    assert_close(trained(NeighborAverage(), 5, 20, topology="ring")[0], torch.stack(history))


def test_overlapped_rounds_are_d_psgd() -> None:
    """Algorithm 1 of arXiv:1705.09056: the gradient at the parameters that are being averaged."""
    x, history = start.repeat(5, 1), []
    for _ in range(20):
        history.append(x - RATE * gradient(x) if not history else MATRIX @ x - RATE * gradient(x))
        x = history[-1]
    settings = {"topology": "ring", "overlap": True, "warm_start": False}
    assert_close(trained(NeighborAverage(), 5, 20, **settings)[0], torch.stack(history))


def compressed(values: Tensor, codec: Codec | None) -> Tensor:
    """Apply the compression operator Q to each row."""
    if codec is None:
        return values
    return torch.stack([codec.decode(codec.encode(row), torch.empty_like(row)) for row in values])


@pytest.mark.parametrize(
    ("codec", "gossip_step"),
    [
        pytest.param(None, 0.7, id="none"),
        pytest.param(Int8(block=8), 0.9, id="int8"),
        pytest.param(Int4Differences(block=8), 0.5, id="int4"),
    ],
)
def test_choco_sgd(codec: Codec | None, gossip_step: float) -> None:
    """Algorithm 2 of arXiv:1902.00340, with parameters relative to the start."""
    x = estimates = torch.zeros(5, len(start), dtype=torch.float64)
    history = []
    for _ in range(30):
        half = x - RATE * gradient(start + x)
        estimates = estimates + compressed(half - estimates, codec)
        x = half + gossip_step * (MATRIX @ estimates - estimates)
        history.append(x)
    algorithm = ChocoSGD(gossip_step, codec)
    found, simulation = trained(algorithm, 5, 30, topology="ring", compression=codec)
    assert_close(found, start + torch.stack(history))
    for own, state in zip(start + estimates, states_of(simulation), strict=True):
        assert_close(state["estimate"], own)


def flow(x: Tensor, tilde: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Solve A2CiD2's equations between events, for time 1, by the exponential of their matrix."""
    matrix = torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64)
    (a, b), (c, d) = torch.linalg.matrix_exp(matrix)
    return a * x + b * tilde, c * x + d * tilde


@pytest.mark.parametrize("num_workers", [5, 6])
def test_a2cid2_on_matchings(num_workers: int) -> None:
    """Equation 4 of arXiv:2306.08289, event by event: local steps, then each pair of a round."""
    rate, alpha, alpha_tilde = 0.4, 0.3, 0.5
    topology = RandomMatching(seed=2)
    x, tilde = start.repeat(num_workers, 1), start.repeat(num_workers, 1)
    history = []
    for t in range(25):
        step = RATE * gradient(x)
        x, tilde = x - step, tilde - step
        for i in range(num_workers):
            j = topology.partner(i, num_workers, t)
            if i < j:
                apart = x[i] - x[j]
                x[i], x[j] = x[i] - alpha * apart, x[j] + alpha * apart
                tilde[i], tilde[j] = tilde[i] - alpha_tilde * apart, tilde[j] + alpha_tilde * apart
        x, tilde = flow(x, tilde, rate)
        history.append(x)
    algorithm = A2CiD2(rate, alpha, alpha_tilde)
    found, simulation = trained(algorithm, num_workers, 25, topology=topology)
    assert_close(found, torch.stack(history))
    assert_close(torch.stack([state["tilde"] for state in states_of(simulation)]), tilde)


def test_a2cid2_on_a_ring_with_the_numbers_of_the_paper() -> None:
    """Ring of n: smallest positive eigenvalue (2 - 2 cos(2 pi / n)) / 3, resistance 3 (n-1) / n."""
    chi_1 = 3 / (2 - 2 * torch.cos(torch.tensor(2 * torch.pi / 5, dtype=torch.float64)))
    chi_2 = torch.tensor(3 * 4 / 5 / 2, dtype=torch.float64)
    rate, alpha_tilde = float(0.5 / (chi_1 * chi_2).sqrt()), (chi_1 / chi_2).sqrt()
    x = tilde = start.repeat(5, 1)
    history = []
    for _ in range(25):
        step = RATE * gradient(x)
        x, tilde = x - step, tilde - step
        apart = x - MATRIX @ x
        x, tilde = flow(x - apart, tilde - alpha_tilde * apart, rate)
        history.append(x)
    assert_close(trained(A2CiD2(), 5, 25, topology="ring")[0], torch.stack(history))
