"""NoLoCo: its formula, the methods that it reduces to, and its default topology."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from lightning_loco import DiLoCo, GASLoC, NoLoCo, NoLoCoStrategy, Simulation
from lightning_loco.algorithms import Algorithm, RoundInfo
from lightning_loco.topology import Complete, RandomMatching, Ring, Topology
from tests.harness.toys import Point, assert_close, flat_rounds, move_to, randn


def prepared(algorithm: Algorithm, num_workers: int, topology: Topology) -> Algorithm:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return algorithm.prepare(num_workers, topology)


def test_it_is_the_two_sums_of_the_paper(subtests: pytest.Subtests) -> None:
    """Drifts and outer parameters are averaged separately, as in the published code."""
    num_workers, a, beta = 6, 0.5, 0.7
    targets, starts = randn(num_workers, 4), randn(num_workers, 4, seed=1)
    for topology, gossip_step in itertools.product([RandomMatching(3), Ring()], [None, 0.4]):
        with subtests.test(str(topology), gossip_step=gossip_step):
            gamma = beta if gossip_step is None else gossip_step
            algorithm = prepared(NoLoCo(a, beta, gossip_step), num_workers, topology)
            history = flat_rounds(algorithm, starts, move_to(targets, 0.3), 6, topology)
            phi, delta = starts.clone(), torch.zeros_like(starts)
            for t in range(6):
                theta = phi + 0.3 * (targets - phi)
                mixing = topology.mixing_matrix(num_workers, t)
                delta = a * delta + beta * mixing @ (theta - phi) + gamma * (mixing @ phi - phi)
                phi = phi + delta
                assert_close(history[t + 1], phi)


def test_equal_steps_send_the_local_parameters_as_they_are() -> None:
    state = NoLoCo().init(randn(4))
    local = randn(4, seed=1)
    assert NoLoCo().propose(local, state, RoundInfo()) is local
    assert torch.equal(NoLoCo(gossip_step=0.7).propose(local.clone(), state, RoundInfo()), local)
    assert not torch.equal(
        NoLoCo(gossip_step=0.5).propose(local.clone(), state, RoundInfo()), local
    )


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
def test_on_a_complete_graph_it_is_heavy_ball_diloco_on_every_worker(momentum: float) -> None:
    targets, start = randn(4, 3), randn(3, seed=1).expand(4, 3)
    algorithm = prepared(NoLoCo(momentum, 0.7), 4, Complete())
    gossip = flat_rounds(algorithm, start, move_to(targets, 0.4), 8, Complete())
    diloco = flat_rounds(DiLoCo(0.7, momentum, nesterov=False), start, move_to(targets, 0.4), 8)
    assert_close(gossip, diloco)


@pytest.mark.parametrize("topology", [RandomMatching(1), Ring()], ids=["pairs", "ring"])
def test_without_momentum_and_with_a_full_step_it_is_gasloc(topology: Topology) -> None:
    targets, starts = randn(5, 3), randn(5, 3, seed=1)
    noloco = prepared(NoLoCo(0.0, 0.6, gossip_step=1.0), 5, topology)
    gasloc = prepared(GASLoC(outer_lr=0.6, momentum=0.0), 5, topology)
    histories = [
        flat_rounds(algorithm, starts, move_to(targets, 0.4), 7, topology)
        for algorithm in (noloco, gasloc)
    ]
    assert_close(*histories)


def test_by_default_random_pairs_are_drawn_from_the_seed_of_the_run() -> None:
    models = [Point(torch.zeros(2)) for _ in range(4)]
    torch.manual_seed(11)
    assert Simulation(models, NoLoCo()).settings.topology == RandomMatching(11)
    assert NoLoCoStrategy(topology="ring").settings.prepare(4).topology == Ring()
    assert NoLoCoStrategy().settings.prepare(4, seed=5).topology == RandomMatching(5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_lr": 0.0}, "outer_lr must be positive, got 0.0"),
        ({"gossip_step": -1.0}, "gossip_step must be positive, got -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NoLoCo(**settings)


def test_gossip_that_diverges_is_refused_or_warned_about() -> None:
    with pytest.raises(
        ValueError, match="makes gossip of 8 workers diverge: .* Use lower values of both"
    ):
        NoLoCo(outer_lr=2.9).prepare(8, Ring())
    with pytest.warns(UserWarning, match="gossip_step=1.9 with outer_momentum=0.9 makes gossip"):
        NoLoCo(0.9, gossip_step=1.9).prepare(8, RandomMatching())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoLoCo().prepare(64, RandomMatching())
