"""Gossip with momentum: optimal settings and stability limits, compared with simulations."""

from __future__ import annotations

import math

import networkx as nx
import pytest
import torch

from lightning_loco.topology import (
    Complete,
    Exponential,
    FromGraph,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    Topology,
    Torus,
    Xor,
    gossip_radius,
    optimal_gossip,
)

torch.set_num_threads(1)


def test_table_of_optimal_settings(subtests: pytest.Subtests) -> None:
    for topology, num_workers, expected in (
        (Ring(), 8, (1.569, 0.199, 0.447)),
        (Ring(), 16, (2.10, 0.454, 0.674)),
        (Ring(), 32, (2.488, 0.675, 0.822)),
        (Torus(), 16, (1.111, 0.111, 0.333)),
        (Torus(), 64, (1.549, 0.330, 0.574)),
        (Hypercube(), 16, (1.111, 0.111, 0.333)),
        (FromGraph(nx.circulant_graph(16, [1, 2, 4, 8])), 16, (1.188, 0.053, 0.229)),
        (Complete(), 8, (1.0, 0.0, 0.0)),
    ):
        with subtests.test(str(topology), num_workers=num_workers):
            best = optimal_gossip(topology, num_workers)
            assert best == pytest.approx(expected, abs=1.01e-3)
            assert best.rate == pytest.approx(math.sqrt(best.momentum), abs=1e-12)


@pytest.mark.parametrize("topology", [Ring(), Torus(), Star()], ids=str)
def test_no_other_setting_is_faster(topology: Topology) -> None:
    best = optimal_gossip(topology, 16)
    reached = gossip_radius(topology, 16, best.gossip_step, best.momentum)
    assert reached == pytest.approx(best.rate, abs=1e-6)
    for step in (0.9, 0.98, 1.02, 1.1):
        assert (
            gossip_radius(topology, 16, best.gossip_step * step, best.momentum) > best.rate - 1e-9
        )
        assert (
            gossip_radius(topology, 16, best.gossip_step, best.momentum * step) > best.rate - 1e-9
        )


def test_rate_shows_in_a_run_on_a_ring_of_16() -> None:
    best = optimal_gossip(Ring(), 16)
    slope = slopes_of_a_run(Ring(), 16, best.gossip_step, best.momentum)["local"]
    assert slope == pytest.approx(0.674, rel=5e-3)


def test_optimal_gossip_of_one_worker() -> None:
    assert optimal_gossip(Ring(), 1) == (1.0, 0.0, 0.0)
    assert gossip_radius(Ring(), 1, 1.0, 0.9) == 0


def test_optimal_gossip_needs_a_fixed_undirected_graph() -> None:
    with pytest.raises(ValueError, match="'random_matching' changes from round to round"):
        optimal_gossip(RandomMatching(), 8)
    with pytest.raises(ValueError, match="'exponential' is directed"):
        optimal_gossip(Exponential(), 8)


FORMS = ("local", "gossiped")


def slopes_of_a_run(
    topology: Topology, num_workers: int, gossip_step: float, momentum: float
) -> dict[str, float]:
    """Measure the factor per round of the recursion, between rounds 120 and 720, for each form.

    After each round the mean, a rounding error, is subtracted and the state is normalized, so
    that neither affects the slope.
    """
    torch.manual_seed(3)
    identity = torch.eye(num_workers, dtype=torch.float64)
    period = topology.period(num_workers) or 1
    laplacians = [
        topology.laplacian_scale * (identity - topology.mixing_matrix(num_workers, t))
        for t in range(period)
    ]
    values = previous = torch.randn(num_workers, 1, dtype=torch.float64).expand(-1, len(FORMS))
    is_local = torch.tensor([form == "local" for form in FORMS])
    lengths = []
    for t in range(720):
        mixed = values - gossip_step * laplacians[t % period] @ values
        point = torch.where(is_local, values, mixed)
        values, previous = mixed + momentum * (point - previous), point
        both = torch.stack([values - values.mean(0), previous - previous.mean(0)])
        lengths.append(both.norm(dim=(0, 1)))
        values, previous = both / lengths[-1]
    slopes = torch.stack(lengths[120:]).log().mean(0).exp()
    return dict(zip(FORMS, slopes.tolist(), strict=True))


def test_radius_is_the_slope_of_a_run(subtests: pytest.Subtests) -> None:
    for topology, num_workers, gossip_step, momentum in (
        (Ring(), 8, 1.0, 0.5),
        (Ring(), 8, 1.5, 0.9),
        (Star(), 6, 0.7, 0.3),
        (Exponential(), 8, 1.0, 0.5),
        (Xor(), 8, 0.5, 0.5),
        (Xor(), 8, 0.3, 0.9),
        (OnePeerExponential(), 6, 1.0, 0.2),
        (Complete(), 4, 0.8, 0.9),
    ):
        with subtests.test(str(topology), gossip_step=gossip_step, momentum=momentum):
            slopes = slopes_of_a_run(topology, num_workers, gossip_step, momentum)
            for form, slope in slopes.items():
                radius = gossip_radius(topology, num_workers, gossip_step, momentum, form)
                assert slope == pytest.approx(radius, rel=5e-3)


def test_with_exact_averaging_the_rate_is_the_root_of_the_momentum() -> None:
    assert gossip_radius(Complete(), 8, 1.0, 0.9) == pytest.approx(math.sqrt(0.9))
    assert gossip_radius(Complete(), 8, 1.0, 0.9, "gossiped") == pytest.approx(0, abs=1e-6)


def test_radius_of_exact_schedules_is_zero(subtests: pytest.Subtests) -> None:
    for num_workers in (2, 4, 8, 64):
        with subtests.test(num_workers=num_workers):
            for form in ("local", "gossiped"):
                assert gossip_radius(Xor(), num_workers, 0.5, 0.0, form) == 0
                assert gossip_radius(OnePeerExponential(), num_workers, 1.0, 0.0, form) == 0


def test_stability_limit_of_a_fixed_graph() -> None:
    """local: gossip_step * lambda_max below 2 (1 + momentum)."""
    limit = 2 * 1.5 / (4 / 3)
    assert (
        gossip_radius(Ring(), 8, limit * 0.999, 0.5)
        < 1
        < gossip_radius(Ring(), 8, limit * 1.001, 0.5)
    )


def test_unknown_form_of_momentum() -> None:
    with pytest.raises(ValueError, match="momentum_on must be 'local' or 'gossiped', got 'global'"):
        gossip_radius(Ring(), 8, 1.0, 0.5, "global")
    with pytest.raises(ValueError, match="momentum_on must be"):
        gossip_radius(RandomMatching(), 8, 0.5, 0.5, "global")
