"""Diverging settings, and no others, are refused or warned about before training."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any, Literal

import networkx as nx
import pytest
import torch

from lightning_loco import DelayedNesterov, DiLoCo, GASLoC, Simulation
from lightning_loco.algorithms import Algorithm, largest_stable_contraction
from lightning_loco.topology import (
    FromGraph,
    RandomMatching,
    RandomTwoPeer,
    Topology,
    get_topology,
)
from tests.harness.cover import cover
from tests.harness.toys import Point, distances, flat_rounds, no_progress, randn

MOMENTUM_ON: list[Literal["local", "gossiped"]] = ["local", "gossiped"]


def test_table_of_the_largest_stable_contraction(subtests: pytest.Subtests) -> None:
    table = {
        # (outer_lr, momentum): delay 0, 1, 2; the search ends at 2
        (0.7, 0.9): (1.94, 0.361, 0.115),
        (0.4, 0.9): (2, 0.632, 0.201),
        (0.2, 0.9): (2, 1.27, 0.40),
        (0.1, 0.9): (2, 2, 0.81),
        (0.7, 0.5): (2, 0.80, 0.45),
        (0.7, 0.3): (2, 1.03, 0.61),
        (0.7, 0.0): (2, 1.43, 0.88),
        (1.0, 0.0): (2, 1.0, 0.62),
    }
    for (outer_lr, momentum), limits in table.items():
        for delay, limit in enumerate(limits):
            with subtests.test(outer_lr=outer_lr, momentum=momentum, delay=delay):
                digits = max(2, len(str(limit).partition(".")[2]))
                found = largest_stable_contraction(outer_lr, momentum, delay=delay)
                assert found == pytest.approx(limit, abs=10**-digits)


def test_limits_that_are_known_in_closed_form() -> None:
    """Without momentum: |1 - eta k| < 1 at once, eta k < 1 late; heavy ball: eta k < 2 (1 + mu)."""
    assert largest_stable_contraction(1.3, 0.0, delay=0) == pytest.approx(2 / 1.3)
    assert largest_stable_contraction(0.8, 0.0, delay=1) == pytest.approx(1 / 0.8)
    limit = largest_stable_contraction(3.0, 0.6, nesterov=False, delay=0)
    assert limit == pytest.approx(2 * 1.6 / 3)


def test_the_limit_of_delayed_nesterov_is_where_it_begins_to_diverge(
    subtests: pytest.Subtests,
) -> None:
    for momentum, every in ((0.9, 2), (0.5, 3), (0.0, 4)):
        for overlap in (False, True):
            with subtests.test(momentum=momentum, every=every, overlap=overlap):
                rate = 1.2 * every
                limit = largest_stable_contraction(rate, momentum, delay=int(overlap), every=every)
                assert limit < 2
                algorithm = DelayedNesterov(rate, momentum, every)
                rounds = 100 if not overlap else 500 if momentum == 0.9 else 300
                assert error_after(algorithm, 0.95 * limit, rounds, overlap) < 1e-3
                assert error_after(algorithm, 1.05 * limit, rounds, overlap) > 10


def test_a_block_of_one_round_is_nesterov_and_no_momentum_has_no_blocks() -> None:
    for delay in (0, 1, 2):
        plain = largest_stable_contraction(0.7, 0.5, delay=delay)
        assert largest_stable_contraction(0.7, 0.5, delay=delay, every=1) == plain
        three = largest_stable_contraction(2.1, 0.0, delay=delay, every=3)
        assert three == pytest.approx(largest_stable_contraction(0.7, 0.0, delay=delay))


def error_after(algorithm: Algorithm, contraction: float, rounds: int, overlap: bool) -> float:
    model = Point(torch.ones(1, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulation = Simulation([model], algorithm, overlap=overlap)
    simulation.run(lambda worker: model.value.data.mul_(1 - contraction), rounds)
    return abs(simulation.consensus().item())


def test_runs_diverge_right_above_the_limit_and_converge_right_below(
    subtests: pytest.Subtests,
) -> None:
    slow = DiLoCo(1.4, 0.9)
    algorithms = [slow, DiLoCo(2.2, 0.5), DiLoCo(2.4, 0.3, nesterov=False), DiLoCo(1.6, 0.0)]
    for algorithm, overlap in itertools.product(algorithms, [False, True]):
        with subtests.test(str(algorithm), overlap=overlap):
            settings = algorithm.outer_lr, algorithm.outer_momentum, algorithm.nesterov
            limit = largest_stable_contraction(*settings, delay=int(overlap))
            assert 0 < limit < 2
            rounds = 100 if not overlap else 700 if algorithm is slow else 300
            assert error_after(algorithm, 0.95 * limit, rounds, overlap) < 1e-2
            assert error_after(algorithm, 1.05 * limit, rounds, overlap) > 10


def overlap_warnings(algorithm: Algorithm) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Simulation([Point(torch.zeros(1))], algorithm, overlap=True)
    return [str(warning.message) for warning in caught]


def test_pairs_that_are_stable_with_a_delay_are_accepted_without_a_warning(
    subtests: pytest.Subtests,
) -> None:
    pairs = [(0.7, 0.0), (0.7, 0.3), (0.2, 0.9), (0.1, 0.9), (1.0, 0.0)]
    algorithms = [DiLoCo(*pair) for pair in pairs]
    for algorithm in (*algorithms, DiLoCo(outer_optimizer=torch.optim.Adagrad)):
        with subtests.test(str(algorithm)):
            assert overlap_warnings(algorithm) == []


@pytest.mark.parametrize(
    ("algorithm", "percent"),
    [(DiLoCo(0.7, 0.9), 36), (DiLoCo(0.4, 0.9), 63), (DiLoCo(0.7, 0.5), 80)],
    ids=str,
)
def test_pairs_that_may_be_unstable_with_a_delay_are_warned_about_once(
    algorithm: DiLoCo, percent: int
) -> None:
    (message,) = overlap_warnings(algorithm)
    assert (
        f"outer_lr={algorithm.outer_lr} with outer_momentum={algorithm.outer_momentum}" in message
    )
    assert f"more than {percent}% of the way to its optimum" in message
    assert "Use outer_momentum=0" in message


def test_pairs_are_not_warned_about_without_overlap() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Simulation([Point(torch.zeros(1))], DiLoCo(0.7, 0.9))


# --------------------------------------------------------------------------- gossip


def verdict(algorithm: GASLoC, num_workers: int, topology: Topology) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            algorithm.prepare(num_workers, topology)
        except ValueError:
            return "refused"
    return "warned" if caught else "accepted"


def unchecked(algorithm: GASLoC, topology: Topology) -> GASLoC:
    """Return what prepare would return without its checks."""
    return GASLoC(
        1.0,
        algorithm.gossip_step,
        algorithm.momentum,
        algorithm.momentum_on,
        topology.laplacian_scale,
    )


def growth(algorithm: GASLoC, num_workers: int, topology: Topology, rounds: int) -> float:
    """Return the growth of the workers' distance in the second half of a run without drift."""
    starts = randn(num_workers, 2)
    ready = unchecked(algorithm, topology)
    found = distances(flat_rounds(ready, starts - starts.mean(0), no_progress, rounds, topology))
    return float((found[-1] / found[rounds // 2]) ** (2 / rounds))


@pytest.mark.parametrize(
    ("name", "num_workers", "momentum_on"),
    cover(
        [
            pytest.param("ring", 5),
            pytest.param("star", 4),
            pytest.param("exponential", 6),
            pytest.param("one_peer_exponential", 6),
            *(
                pytest.param(*row, marks=pytest.mark.soak)
                for row in (
                    ("complete", 3),
                    ("torus", 6),
                    ("grid", 6),
                    ("hypercube", 4),
                    ("one_peer_exponential", 4),
                    ("xor", 4),
                )
            ),
        ],
        MOMENTUM_ON,
        strength=1,
    ),
)
def test_settings_are_refused_if_and_only_if_the_distance_grows_in_a_run(
    name: str, num_workers: int, momentum_on: Literal["local", "gossiped"]
) -> None:
    topology = get_topology(name)
    seen = set()
    for gossip_step, momentum in itertools.product([0.4, 1.0, 1.7, 3.2], [0.0, 0.5, 0.9]):
        algorithm = GASLoC(1.0, gossip_step, momentum, momentum_on)
        factor = growth(algorithm, num_workers, topology, 96)
        if abs(factor - 1) > 0.02:  # a short run cannot distinguish values closer to 1
            expected = "refused" if factor > 1 else "accepted"
            assert verdict(algorithm, num_workers, topology) == expected, (algorithm, factor)
            seen.add(expected)
    assert seen == {"refused", "accepted"}


def test_limit_of_a_fixed_graph_to_the_third_digit(subtests: pytest.Subtests) -> None:
    """local: gossip_step * lambda_max < 2 (1 + momentum); gossiped: < 1 + 1 / (1 + 2 momentum)."""
    for name in ("ring", "star", "torus", "hypercube", "complete"):
        with subtests.test(name):
            topology = get_topology(name)
            spectrum = torch.linalg.eigvalsh(topology.mixing_matrix(8))
            largest = 1 - float(spectrum[0])
            for momentum in (0.0, 0.3, 0.9):
                limits: dict[Any, float] = {
                    "local": 2 * (1 + momentum),
                    "gossiped": 1 + 1 / (1 + 2 * momentum),
                }
                for momentum_on, limit in limits.items():
                    below = GASLoC(1.0, 0.999 * limit / largest, momentum, momentum_on)
                    above = GASLoC(1.0, 1.001 * limit / largest, momentum, momentum_on)
                    assert verdict(below, 8, topology) == "accepted"
                    with pytest.raises(ValueError, match=f"must be below {limit:g}, and .* is "):
                        above.prepare(8, topology)


def test_the_error_contains_the_fix() -> None:
    with pytest.raises(ValueError, match=r"gossip_step=2 with momentum=0 .* Use gossip_step='auto"):
        GASLoC(gossip_step=2.0, momentum=0.0).prepare(8, get_topology("ring"))


def test_momentum_for_hundreds_of_steps_is_warned_about_on_random_matchings(
    subtests: pytest.Subtests,
) -> None:
    for num_workers in (4, 8, 9, 64):
        text = r"gossip_step=0.5 with momentum=0.9 .*not mean-square st"
        with subtests.test(num_workers=num_workers), pytest.warns(UserWarning, match=text):
            GASLoC(0.7, 0.5, 0.9, "local").prepare(num_workers, RandomMatching())


def test_the_step_of_a_laplacian_is_checked() -> None:
    """On a ring of 8 with lambda = 1 the largest eigenvalue is 4."""
    ring = FromGraph(nx.cycle_graph(8), "laplacian")
    message = r"gossip_step \* lambda_max must be below 2.8, and lambda_max is 4"
    with pytest.raises(ValueError, match=message):
        GASLoC(1.0, 0.71, 0.4, "local").prepare(8, ring)
    GASLoC(1.0, 0.69, 0.4, "local").prepare(8, ring)
    assert GASLoC().prepare(8, ring).gossip_step == pytest.approx(1 / 3)  # as with Metropolis


def test_limits_on_random_matchings_of_8_workers(subtests: pytest.Subtests) -> None:
    rows: list[tuple[float, float, Literal["local", "gossiped"], str]] = [
        (0.5, 0.0, "local", "accepted"),
        (0.5, 0.7, "local", "accepted"),
        (0.5, 0.78, "local", "warned"),
        (0.2, 0.9, "local", "accepted"),
        (0.3, 0.9, "local", "warned"),
        (0.5, 0.84, "gossiped", "accepted"),
        (0.5, 0.9, "gossiped", "warned"),
        (0.2, 0.9, "gossiped", "accepted"),
    ]
    for gossip_step, momentum, momentum_on, expected in rows:
        with subtests.test(momentum_on, gossip_step=gossip_step, momentum=momentum):
            algorithm = GASLoC(1.0, gossip_step, momentum, momentum_on)
            assert verdict(algorithm, 8, RandomMatching()) == expected


@pytest.mark.parametrize("topology", [RandomMatching, RandomTwoPeer])
def test_workers_drift_apart_where_a_warning_says_so(topology: Any) -> None:
    """Mean square over a few random sequences of pairs, without any drift of the workers."""
    unstable, stable = GASLoC(1.0, 1.0, 0.9), GASLoC(1.0, 0.5, 0.0)
    if topology is RandomTwoPeer:
        unstable = GASLoC(1.0, 2.5, 0.9)
    means = []
    for algorithm in (unstable, stable):
        starts = randn(8, 1)
        runs = []
        for seed in range(6):
            ready = unchecked(algorithm, topology())
            runs.append(distances(flat_rounds(ready, starts, no_progress, 30, topology(seed))) ** 2)
        means.append(torch.stack(runs).mean(0))
    assert verdict(unstable, 8, topology()) == "warned"
    assert verdict(stable, 8, topology()) == "accepted"
    assert means[0][-1] > 10 * means[0][0]
    assert means[1][-1] < 1e-3 * means[1][0]


@pytest.mark.parametrize(
    "name",
    ["ring", "complete", "star", "torus", "hypercube", "exponential", "one_peer_exponential"]
    + ["xor", "random_matching", "random_two_peer", "grid"],
)
def test_automatic_settings_are_stable_everywhere(name: str, subtests: pytest.Subtests) -> None:
    topology = get_topology(name)
    for num_workers, momentum_on in itertools.product([2, 3, 4, 6, 8, 16], MOMENTUM_ON):
        with subtests.test(num_workers=num_workers, momentum_on=momentum_on):
            try:
                topology.check(num_workers)
            except ValueError:
                assert name in ("hypercube", "xor")
                assert not math.log2(num_workers).is_integer()
                continue
            algorithm = GASLoC(momentum_on=momentum_on)
            assert verdict(algorithm, num_workers, topology) == "accepted"


def test_a_single_worker_never_diverges() -> None:
    assert verdict(GASLoC(gossip_step=50.0, momentum=0.9), 1, get_topology("ring")) == "accepted"
