"""A2CiD2: equal to the paper's equations between events; its rate; what it reduces to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_loco import NeighborAverage
from lightning_loco.algorithms import A2CiD2
from lightning_loco.topology import (
    Complete,
    RandomMatching,
    Ring,
    Topology,
    Torus,
    consensus_rate,
    get_topology,
    optimal_gossip,
)
from tests.algorithms.quadratics import RATE, distance, gossiped, gradient, start, trained
from tests.algorithms.toys import assert_close, randn


def flow(x: Tensor, tilde: Tensor, rate: float, time: float) -> tuple[Tensor, Tensor]:
    """The equations between events, by the exponential of their matrix."""
    matrix = torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64)
    (a, b), (c, d) = torch.linalg.matrix_exp(matrix * time)
    return a * x + b * tilde, c * x + d * tilde


def by_events(
    algorithm: A2CiD2, topology: RandomMatching, num_workers: int, rounds: int
) -> tuple[Tensor, Tensor]:
    """Equation 4 of arXiv:2306.08289, event by event: steps of all, then each pair of the round."""
    rate, alpha, alpha_tilde = (
        algorithm.mixing_rate,
        algorithm.gossip_step,
        algorithm.momentum_step,
    )
    x, tilde = start.repeat(num_workers, 1), start.repeat(num_workers, 1)
    history = []
    for t in range(rounds):
        step = RATE * gradient(x)
        x, tilde = x - step, tilde - step
        for i in range(num_workers):
            j = topology.partner(i, num_workers, t)
            if i < j:
                apart = x[i] - x[j]
                x[i], x[j] = x[i] - alpha * apart, x[j] + alpha * apart
                tilde[i], tilde[j] = tilde[i] - alpha_tilde * apart, tilde[j] + alpha_tilde * apart
        x, tilde = flow(x, tilde, rate, 1.0)
        history.append(x)
    return torch.stack(history), tilde


@pytest.mark.parametrize(
    "algorithm", [A2CiD2(0.4, 0.5, 0.8), A2CiD2(0.4, 0.3, 0.5), A2CiD2(0.0, 0.5, 0.5)]
)
@pytest.mark.parametrize("num_workers", [5, 6])
def test_it_equals_the_equations_of_the_paper(algorithm: A2CiD2, num_workers: int) -> None:
    topology = RandomMatching(seed=2)
    expected, tilde = by_events(algorithm, topology, num_workers, 25)
    found, simulation = trained(algorithm, num_workers, 25, topology=topology)
    assert_close(found, expected)
    assert_close(torch.stack([state["tilde"] for state in simulation.states]), tilde)


def test_on_a_fixed_graph_all_edges_are_averaged_at_once() -> None:
    rate, alpha, alpha_tilde = 0.3, 0.9, 1.4
    laplacian = torch.eye(6, dtype=torch.float64) - Ring().mixing_matrix(6)
    x = tilde = start.repeat(6, 1)
    history = []
    for _ in range(25):
        step = RATE * gradient(x)
        x, tilde = x - step, tilde - step
        apart = laplacian @ x
        x, tilde = flow(x - alpha * apart, tilde - alpha_tilde * apart, rate, 1.0)
        history.append(x)
    found, _ = trained(A2CiD2(rate, alpha, alpha_tilde), 6, 25, topology="ring")
    assert_close(found, torch.stack(history))


@pytest.mark.parametrize("topology", ["ring", "random_matching", "exponential", "xor"])
def test_without_mixing_it_is_plain_gossip(topology: str) -> None:
    expected, _ = trained(NeighborAverage(), 8, 20, topology=topology)
    assert_close(trained(A2CiD2(mixing_rate=0.0), 8, 20, topology=topology)[0], expected)


@pytest.mark.parametrize("topology", ["ring", "random_matching", "xor"])
def test_the_mean_moves_by_the_gradients_only(topology: str) -> None:
    found, simulation = trained(A2CiD2(), 8, 20, topology=topology)
    before = torch.cat([start.expand(1, 8, -1), found[:-1]])
    steps = torch.stack([RATE * gradient(x).mean(0) for x in before])
    assert_close(found.mean(1), before.mean(1) - steps)
    tilde = torch.stack([state["tilde"] for state in simulation.states])
    assert_close(tilde.mean(0), found[-1].mean(0))


@pytest.mark.parametrize(("topology", "num_workers"), [(Ring(), 16), (Ring(), 32), (Torus(), 64)])
def test_its_rate_on_a_fixed_graph_is_better_than_that_of_plain_gossip(
    topology: Topology, num_workers: int
) -> None:
    algorithm = A2CiD2().prepare(num_workers, topology)
    factor = algorithm.consensus_factor(num_workers, topology)
    found, _ = gossiped(A2CiD2(), randn(num_workers, 8), 100, topology=topology)
    measured = (distance(found[99]) / distance(found[39])) ** (1 / 60)
    assert measured == pytest.approx(factor, abs=0.02)  # it oscillates
    assert factor < consensus_rate(topology, num_workers) - 0.01
    assert factor > optimal_gossip(topology, num_workers).rate  # no momentum of two terms is better


def test_gossip_of_random_pairs_converges_at_a_linear_rate() -> None:
    """The square of the distance shrinks by exp(-1 / (2 sqrt(chi_1 chi_2))) per round or faster."""
    for num_workers in (4, 8, 16):
        rate = A2CiD2().prepare(num_workers, RandomMatching()).mixing_rate
        assert isinstance(rate, float)
        values = randn(num_workers, 8)
        found, _ = gossiped(A2CiD2(), values, 60, topology="random_matching")
        for rounds in (20, 40, 60):
            bound = math.exp(-rate * rounds / 2)
            assert distance(found[rounds - 1]) < bound * distance(values)


def test_auto_is_what_the_paper_names() -> None:
    """On a ring of n the smallest mode is (2 - 2 cos(2 pi / n)) / 3, a resistance 3 (n - 1) / n."""
    for n in (5, 8, 20):
        chi_1 = 3 / (2 - 2 * torch.cos(torch.tensor(2 * torch.pi / n, dtype=torch.float64)))
        chi_2 = 3 * (n - 1) / n / 2
        algorithm = A2CiD2().prepare(n, Ring())
        assert algorithm.mixing_rate == pytest.approx(float(0.5 / (chi_1 * chi_2).sqrt()))
        assert algorithm.momentum_step == pytest.approx(float((chi_1 / chi_2).sqrt()))
    pairs = A2CiD2().prepare(8, RandomMatching())
    assert (pairs.gossip_step, pairs.momentum_step) == (0.5, 0.5)
    assert pairs.mixing_rate == pytest.approx(0.5 * 8 / 7)  # a pair is drawn with 1 / (n - 1)
    one = A2CiD2().prepare(8, Complete())
    assert (one.gossip_step, one.momentum_step) == (1.0, pytest.approx(1.0))


@pytest.mark.parametrize("name", ["mixing_rate", "gossip_step", "momentum_step"])
def test_refuses_numbers_out_of_range(name: str) -> None:
    for value in (-0.1, float("inf"), "fast"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            A2CiD2(**{name: value})


def test_refuses_directed_graphs_without_numbers() -> None:
    with pytest.raises(ValueError, match="is directed"):
        A2CiD2().prepare(8, get_topology("exponential"))
    A2CiD2(0.2, 1.0, 1.0).prepare(8, get_topology("exponential"))


def test_refuses_what_diverges() -> None:
    with pytest.raises(ValueError, match="does not reach consensus"):
        A2CiD2(gossip_step=2.0).prepare(8, Ring())
