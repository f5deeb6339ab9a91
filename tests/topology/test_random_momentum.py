"""Momentum on random rounds: the mean-square radius, compared with enumeration and Monte Carlo."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_loco.topology import (
    RandomMatching,
    RandomTwoPeer,
    Topology,
    gossip_radius,
)

torch.set_num_threads(1)


def matching_radius(
    num_workers: int, gossip_step: float, momentum: float, form: str = "local"
) -> float:
    """Return the factor per round of the expected squared distance."""
    return gossip_radius(RandomMatching(), num_workers, gossip_step, momentum, form) ** 2


def test_largest_stable_momentum_on_random_matchings(subtests: pytest.Subtests) -> None:
    for form, num_workers, limits in (
        ("local", 8, {0.5: 0.744, 0.4: 0.80, 0.3: 0.86, 0.2: 0.91, 0.1: 0.956, 0.05: 0.978}),
        ("local", 64, {0.5: 0.711, 0.4: 0.78, 0.3: 0.84, 0.2: 0.90, 0.1: 0.949, 0.05: 0.975}),
        ("gossiped", 8, {0.5: 0.859}),
        ("gossiped", 64, {0.5: 0.789, 0.4: 0.94}),
    ):
        for gossip_step, limit in limits.items():
            with subtests.test(form, num_workers=num_workers, gossip_step=gossip_step):
                lowest, highest = 0.0, 1.0
                for _ in range(30):
                    middle = (lowest + highest) / 2
                    if matching_radius(num_workers, gossip_step, middle, form) < 1:
                        lowest = middle
                    else:
                        highest = middle
                digits = 1e-3 if round(limit, 2) != limit else 5.1e-3
                assert lowest == pytest.approx(limit, abs=digits)


@pytest.mark.parametrize("num_workers", [8, 64])
def test_gossiped_momentum_is_stable_at_small_steps(num_workers: int) -> None:
    for gossip_step in (0.3, 0.2, 0.1):
        for momentum in (0.5, 0.9, 0.99):
            assert matching_radius(num_workers, gossip_step, momentum, "gossiped") < 1


def test_known_radii_of_matchings() -> None:
    assert matching_radius(8, 0.5, 0.0) == pytest.approx(6 / 14)
    assert matching_radius(9, 0.5, 0.0) == pytest.approx(0.5)
    assert matching_radius(8, 0.24, 0.9, "gossiped") == pytest.approx(0.807, abs=5e-4)
    assert matching_radius(8, 0.21, 0.9) < 1 < matching_radius(8, 0.22, 0.9)
    assert matching_radius(2, 0.5, 0.0) == pytest.approx(0, abs=1e-12)
    assert matching_radius(1, 0.5, 0.9) == 0
    assert gossip_radius(RandomMatching(), 8, 0.5, 0.0) == pytest.approx(math.sqrt(6 / 14))


def second_moment_radius(
    matrices: torch.Tensor, gossip_step: float, momentum: float, form: str
) -> float:
    """Return the radius of ``E[M (x) M]`` on all second moments, for equally likely rounds.

    ``matrices`` holds the Laplacians ``Lambda`` of the rounds, ``(R, N, N)``.
    """
    num_workers = matrices.shape[-1]
    identity = torch.eye(num_workers, dtype=torch.float64)
    moments = torch.zeros((2 * num_workers) ** 2, (2 * num_workers) ** 2, dtype=torch.float64)
    away_from_mean = torch.block_diag(*[identity - 1 / num_workers] * 2)
    for laplacian in matrices:
        mix = identity - gossip_step * laplacian
        if form == "local":
            rows = [[mix + momentum * identity, -momentum * identity], [identity, 0 * identity]]
        else:
            rows = [[(1 + momentum) * mix, -momentum * identity], [mix, 0 * identity]]
        step = torch.cat([torch.cat(row, dim=1) for row in rows]) @ away_from_mean
        moments += torch.kron(step, step) / len(matrices)
    return float(torch.linalg.eigvals(moments).abs().max())


def all_matchings(workers: list[int]) -> list[list[tuple[int, int]]]:
    """Return all perfect matchings; with an odd number, each worker is left out in turn."""
    if len(workers) % 2:
        rests = [[w for w in workers if w != idle] for idle in workers]
        return [pairs for rest in rests for pairs in all_matchings(rest)]
    if not workers:
        return [[]]
    first, *others = workers
    return [
        [(first, peer), *pairs]
        for peer in others
        for pairs in all_matchings([w for w in others if w != peer])
    ]


def pair_laplacians(num_workers: int) -> torch.Tensor:
    laplacians = []
    for pairs in all_matchings(list(range(num_workers))):
        laplacian = torch.zeros(num_workers, num_workers, dtype=torch.float64)
        for i, j in pairs:
            laplacian[[i, j], [i, j]] = 1
            laplacian[[i, j], [j, i]] = -1
        laplacians.append(laplacian)
    return torch.stack(laplacians)


@pytest.mark.parametrize("form", ["local", "gossiped"])
def test_matching_radius_against_all_matchings(form: str, subtests: pytest.Subtests) -> None:
    for num_workers in (2, 3, 4, 5, 6):
        with subtests.test(num_workers=num_workers):
            laplacians = pair_laplacians(num_workers)
            for gossip_step, momentum in (
                (0.5, 0.0),
                (0.5, 0.5),
                (0.5, 0.9),
                (0.3, 0.8),
                (0.9, 0.2),
            ):
                exact = second_moment_radius(laplacians, gossip_step, momentum, form)
                radius = matching_radius(num_workers, gossip_step, momentum, form)
                assert radius == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("form", ["local", "gossiped"])
def test_two_peer_radius_against_all_pairs_of_matchings(
    form: str, subtests: pytest.Subtests
) -> None:
    for num_workers in (2, 3, 4, 5):
        with subtests.test(num_workers=num_workers):
            single = pair_laplacians(num_workers)
            pairs = itertools.product(single, single)
            laplacians = torch.stack([(first + second) / 3 for first, second in pairs])
            for gossip_step, momentum in ((1.0, 0.0), (1.0, 0.5), (0.6, 0.9)):
                exact = second_moment_radius(laplacians, gossip_step, momentum, form)
                radius = gossip_radius(RandomTwoPeer(), num_workers, gossip_step, momentum, form)
                assert radius**2 == pytest.approx(exact, abs=1e-6)


def measured_radii(topology: Topology, rows: list[tuple[float, float, str]]) -> torch.Tensor:
    """Measure the factor of the mean square per round, in 20 000 runs of 8 workers.

    ``rows`` holds gossip steps, momenta and forms, which all use the same rounds.
    """
    torch.manual_seed(0)
    drawn = torch.stack([topology.mixing_matrix(8, t) for t in range(1000)])
    laplacians = topology.laplacian_scale * (torch.eye(8, dtype=torch.float64) - drawn)
    steps, momenta = torch.tensor([row[:2] for row in rows], dtype=torch.float64).T
    is_local = torch.tensor([form == "local" for *_, form in rows])
    values = torch.randn(20_000, 8, 1, dtype=torch.float64)
    values = (values - values.mean(dim=1, keepdim=True)).expand(-1, -1, len(rows))
    previous = values
    squares = []
    for _ in range(14):
        mixed = values - steps * (laplacians[torch.randint(1000, (20_000,))] @ values)
        point = torch.where(is_local, values, mixed)
        values, previous = mixed + momenta * (point - previous), point
        squares.append(values.square().mean(dim=(0, 1)))
    return (squares[13] / squares[6]) ** (1 / 7)


def test_radius_by_monte_carlo(subtests: pytest.Subtests) -> None:
    for topology, settings in (
        (RandomMatching(5), [(0.5, 0.0), (0.5, 0.4), (0.3, 0.6)]),
        (RandomTwoPeer(5), [(1.0, 0.4)]),
    ):
        rows = [(*pair, form) for pair in settings for form in ("local", "gossiped")]
        for row, measured in zip(rows, measured_radii(topology, rows).tolist(), strict=True):
            with subtests.test(str(topology), row=row):
                assert measured == pytest.approx(gossip_radius(topology, 8, *row) ** 2, rel=0.03)
