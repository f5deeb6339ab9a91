"""Rates and eigenvalues against simulation and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_loco.topology import (
    Complete,
    Exponential,
    FromMatrix,
    Grid,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RandomTwoPeer,
    Ring,
    Star,
    Topology,
    Torus,
    Xor,
    chi,
    consensus_rate,
    get_topology,
    lambda_max,
    spectral_gap,
)

FIXED = [Ring(), Star(), Star("uniform"), Torus(), Grid(), Hypercube(), Complete(), Ring("uniform")]


@pytest.mark.parametrize("topology", FIXED, ids=str)
@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_distance_shrinks_at_least_by_the_rate(topology: Topology, num_workers: int) -> None:
    torch.manual_seed(0)
    matrix = topology.mixing_matrix(num_workers)
    rate = consensus_rate(topology, num_workers)
    start = values = torch.randn(num_workers, dtype=torch.float64)
    for t in range(1, 20):
        values = matrix @ values
        distance = (values - values.mean()).norm()
        assert distance <= rate**t * (start - start.mean()).norm() + 1e-13


@pytest.mark.parametrize("topology", [t for t in FIXED if t != Complete()], ids=str)
@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_the_slowest_direction_shrinks_exactly_by_the_rate(
    topology: Topology, num_workers: int
) -> None:
    matrix = topology.mixing_matrix(num_workers)
    rate = consensus_rate(topology, num_workers)
    values, vectors = torch.linalg.eigh(matrix - 1 / num_workers)
    slowest = vectors[:, values.abs().argmax()]
    for t in range(1, 6):
        left = float((torch.linalg.matrix_power(matrix, t) @ slowest).norm())
        assert left == pytest.approx(rate**t, abs=1e-12)


@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_exact_schedules_have_rate_zero(num_workers: int) -> None:
    for topology in (Xor(), OnePeerExponential()):
        assert consensus_rate(topology, num_workers) == 0
        assert spectral_gap(topology, num_workers) == 1


@pytest.mark.parametrize(
    "name", ["ring", "xor", "random_matching", "random_two_peer", "exponential"]
)
def test_one_worker_has_no_distance(name: str) -> None:
    topology = get_topology(name)
    assert consensus_rate(topology, 1) == 0
    assert spectral_gap(topology, 1) == 1
    assert lambda_max(topology, 1) == 0


def test_gap_is_one_minus_rate() -> None:
    assert spectral_gap(Ring(), 8) == pytest.approx(1 - 0.80474, abs=1e-5)


@pytest.mark.parametrize("topology", FIXED, ids=str)
def test_lambda_max_and_chi_are_those_of_the_laplacian(topology: Topology) -> None:
    eigenvalues = torch.linalg.eigvalsh(torch.eye(8) - topology.mixing_matrix(8))
    assert lambda_max(topology, 8) == pytest.approx(float(eigenvalues[-1]), abs=1e-12)
    assert chi(topology, 8) == pytest.approx(float(eigenvalues[-1] / eigenvalues[1]), abs=1e-9)


def test_known_condition_numbers() -> None:
    mu = 2 / 3 * (1 - math.cos(math.pi / 4))
    assert chi(Ring(), 8) == pytest.approx(4 / 3 / mu)
    assert chi(Complete(), 8) == pytest.approx(1)
    assert chi(Hypercube(), 16) == pytest.approx(4)
    assert chi(Xor(), 2) == pytest.approx(1)
    assert chi(Ring(), 1) == 1


@pytest.mark.parametrize("num_workers", [2, 3, 6, 8])
def test_pairs_have_lambda_max_two(num_workers: int) -> None:
    assert lambda_max(RandomMatching(), num_workers) == 2
    if num_workers in (2, 8):
        assert lambda_max(Xor(), num_workers) == pytest.approx(2)


def test_lambda_max_of_two_peers_is_reached_and_never_passed() -> None:
    topology = RandomTwoPeer(0)
    largest = max(
        float(torch.linalg.eigvalsh(torch.eye(6) - topology.mixing_matrix(6, t))[-1])
        for t in range(60)
    )
    assert largest == pytest.approx(lambda_max(topology, 6), abs=1e-12)


@pytest.mark.parametrize("topology", [Exponential(), OnePeerExponential(), Ring(), Xor()], ids=str)
@pytest.mark.parametrize("num_workers", [4, 8])
def test_plain_gossip_is_stable_up_to_two_over_lambda_max(
    topology: Topology, num_workers: int
) -> None:
    limit = 2 / lambda_max(topology, num_workers)
    identity = torch.eye(num_workers)
    for factor, stable in ((0.999, True), (1.01, False)):
        radii = []
        for t in range(topology.period(num_workers) or 1):
            laplacian = topology.laplacian_scale * (
                identity - topology.mixing_matrix(num_workers, t)
            )
            mixed = torch.linalg.eigvals(identity - factor * limit * laplacian - 1 / num_workers)
            radii.append(float(mixed.abs().max()))
        assert (max(radii) <= 1 + 1e-9) is stable


def test_chi_needs_a_fixed_undirected_graph() -> None:
    for topology in (Xor(), RandomMatching(), OnePeerExponential()):
        with pytest.raises(
            ValueError, match="changes from round to round and has no fixed spectrum"
        ):
            chi(topology, 8)
    one_way = FromMatrix([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]], directed=True)
    for topology, num_workers in ((Exponential(), 8), (one_way, 3)):
        with pytest.raises(ValueError, match="is directed and its spectrum complex"):
            chi(topology, num_workers)


def test_number_of_workers_is_checked() -> None:
    for ask in (consensus_rate, lambda_max, chi, spectral_gap):
        with pytest.raises(ValueError, match="needs a power of two workers, got 6"):
            ask(Hypercube(), 6)


def test_random_topology_without_moments() -> None:
    class Unknown(Ring):
        def period(self, num_workers: int) -> None:
            return None

    with pytest.raises(ValueError, match="Derive it from RandomTopology"):
        consensus_rate(Unknown(), 4)
