"""Rates and eigenvalues, compared with simulations and closed forms."""

from __future__ import annotations

import itertools
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
    lambda_max,
    spectral_gap,
)

FIXED = [Ring(), Star(), Torus(), Grid(), Hypercube(), Complete()]


def test_distance_shrinks_at_least_by_the_rate(subtests: pytest.Subtests) -> None:
    for topology, num_workers in itertools.product(FIXED, [4, 8, 16]):
        with subtests.test(str(topology), num_workers=num_workers):
            torch.manual_seed(0)
            matrix = topology.mixing_matrix(num_workers)
            rate = consensus_rate(topology, num_workers)
            start = values = torch.randn(num_workers, dtype=torch.float64)
            for t in range(1, 20):
                values = matrix @ values
                distance = (values - values.mean()).norm()
                assert distance <= rate**t * (start - start.mean()).norm() + 1e-13


def test_the_slowest_direction_shrinks_exactly_by_the_rate(subtests: pytest.Subtests) -> None:
    several = [topology for topology in FIXED if topology != Complete()]
    for topology, num_workers in itertools.product(several, [4, 8, 16]):
        with subtests.test(str(topology), num_workers=num_workers):
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


def test_one_worker_has_no_distance(subtests: pytest.Subtests) -> None:
    for topology in (Ring(), Xor(), RandomMatching(), RandomTwoPeer(), Exponential()):
        with subtests.test(str(topology)):
            assert consensus_rate(topology, 1) == 0
            assert spectral_gap(topology, 1) == 1
            assert lambda_max(topology, 1) == 0


def test_gap_is_one_minus_rate() -> None:
    assert spectral_gap(Ring(), 8) == pytest.approx(1 - 0.80474, abs=1e-5)


def test_lambda_max_and_chi_are_those_of_the_laplacian(subtests: pytest.Subtests) -> None:
    for topology in FIXED:
        with subtests.test(str(topology)):
            eigenvalues = torch.linalg.eigvalsh(torch.eye(8) - topology.mixing_matrix(8))
            smallest, largest = eigenvalues[1], eigenvalues[-1]
            assert lambda_max(topology, 8) == pytest.approx(float(largest), abs=1e-12)
            assert chi(topology, 8) == pytest.approx(float(largest / smallest), abs=1e-9)


def test_known_condition_numbers() -> None:
    mu = 2 / 3 * (1 - math.cos(math.pi / 4))
    assert chi(Ring(), 8) == pytest.approx(4 / 3 / mu)
    assert chi(Complete(), 8) == pytest.approx(1)
    assert chi(Hypercube(), 16) == pytest.approx(4)
    assert chi(Xor(), 2) == pytest.approx(1)
    assert chi(Ring(), 1) == 1


def test_pairs_have_lambda_max_two(subtests: pytest.Subtests) -> None:
    for num_workers in (2, 3, 6, 8):
        with subtests.test(num_workers=num_workers):
            assert lambda_max(RandomMatching(), num_workers) == 2
            if num_workers in (2, 8):
                assert lambda_max(Xor(), num_workers) == pytest.approx(2)


def test_lambda_max_of_two_peers_is_reached_but_not_exceeded() -> None:
    topology = RandomTwoPeer(0)
    largest = max(
        float(torch.linalg.eigvalsh(torch.eye(6) - topology.mixing_matrix(6, t))[-1])
        for t in range(60)
    )
    assert largest == pytest.approx(lambda_max(topology, 6), abs=1e-12)


def test_plain_gossip_is_stable_up_to_two_over_lambda_max(subtests: pytest.Subtests) -> None:
    def radius(topology: Topology, num_workers: int, gossip_step: float) -> float:
        identity = torch.eye(num_workers)
        radii = []
        for t in range(topology.period(num_workers)):
            matrix = topology.mixing_matrix(num_workers, t)
            laplacian = topology.laplacian_scale * (identity - matrix)
            mixed = torch.linalg.eigvals(identity - gossip_step * laplacian - 1 / num_workers)
            radii.append(float(mixed.abs().max()))
        return max(radii)

    for topology in (Exponential(), OnePeerExponential(), Ring(), Xor()):
        for num_workers in (4, 8):
            with subtests.test(str(topology), num_workers=num_workers):
                limit = 2 / lambda_max(topology, num_workers)
                assert radius(topology, num_workers, 0.999 * limit) <= 1 + 1e-9
                assert radius(topology, num_workers, 1.01 * limit) > 1 + 1e-9


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

    with pytest.raises(ValueError, match="Subclass RandomTopology"):
        consensus_rate(Unknown(), 4)
