"""Pairwise gossip on a virtual clock: whose parameters are blended in, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Link, PairwiseAverage
from lightning_loco.gossip import PairwiseSettings
from lightning_loco.simulation import Failure, Simulation
from tests.harness.gossip_nodes import DPWA
from tests.harness.toys import Point, assert_close

NUMEL = 1000
BYTES = 8 * NUMEL


def points(num_workers: int) -> list[Point]:
    return [Point(torch.zeros(NUMEL, dtype=torch.float64)) for _ in range(num_workers)]


def simulation_of(
    models: list[Point], given: dict[str, Any], compression: str | None = None, **settings: Any
) -> Simulation:
    """Return a simulation of gossip with arguments of ``PairwiseAverage``."""
    gossip = PairwiseSettings(PairwiseAverage(**given), compression=compression)
    return Simulation.from_settings(models, gossip, **settings)


def full(value: float) -> Tensor:
    return torch.full((NUMEL,), value, dtype=torch.float64)


def test_two_workers_blend_as_by_hand() -> None:
    """Worker 0 adds 1 in 1 s, worker 1 adds 10 in 2 s; each blends what it fetched before."""
    models = points(2)
    simulation = simulation_of(models, DPWA, speeds=[1.0, 0.5])
    simulation.run(lambda w: models[w].value.data.add_([1.0, 10.0][w]), seconds=3.0)
    # At 1 s: 0 + 1, and the 0 of worker 1. At 2 s worker 0 again: 1.5, and 0. Worker 1: 10, and 0.
    # Its fetch of 2 s returns 0.75 + ...: worker 0 at 3 s: 0.75 + 1, and the 5 of worker 1.
    first = (0 + 1 + 0) / 2
    second = (first + 1 + 0) / 2
    slow = (0 + 10 + 0) / 2
    assert_close(models[1].value.detach(), full(slow))
    assert_close(models[0].value.detach(), full((second + 1 + slow) / 2))
    assert [costs.rounds for costs in simulation.costs] == [3, 1]
    # Clocks: 1, blended with the 1 of worker 1; and so on.
    assert [costs.utilisation for costs in simulation.costs] == [1.0, 1.0]


def test_the_defaults_keep_all_progress_and_send_a_tenth_of_ddp() -> None:
    """Workers with equal progress lose nothing; with dpwa's rule they fall behind."""

    def train(**given: Any) -> tuple[list[float], list[float]]:
        """Return two workers' progress in 1000 steps of 1, and their bytes relative to DDP's."""
        models = points(2)
        simulation = simulation_of(models, given, speeds=[1.0, 1.0])
        simulation.run(lambda w: models[w].value.data.add_(1.0), seconds=1000.0)
        shares = [costs.bytes_sent / (1000 * BYTES) for costs in simulation.costs]
        return [float(model.value[0].detach()) for model in models], shares

    reached, shares = train()
    assert reached == pytest.approx([1000.0, 1000.0])
    assert 0.08 < min(shares) <= max(shares) < 0.12
    reached, shares = train(**DPWA)
    assert max(reached) < 600
    assert min(shares) > 0.99


def test_a_fetch_takes_its_time_on_the_link_and_no_worker_waits() -> None:
    """0.6 s on the link, 0.1 s for request and reply: it arrives by the end of the third step."""
    models = points(2)
    link = Link(BYTES * 8 / 0.6 / 1e6, 0.05)
    simulation = simulation_of(models, DPWA, speeds=[4.0, 4.0], links=link)
    simulation.run(lambda w: models[w].value.data.add_(1.0), seconds=6.05)
    for costs in simulation.costs:
        assert costs.steps == 24
        assert costs.rounds == 8
        assert costs.utilisation == pytest.approx(1.0)
    fetches = [e for e in simulation.timeline if e.kind == "send" and e.worker == 0]
    assert fetches[0].end_s - fetches[0].start_s == pytest.approx(0.7)
    assert fetches[1].start_s == pytest.approx(0.75)
    assert sum(costs.bytes_sent for costs in simulation.costs) in (16 * BYTES, 18 * BYTES)


def test_a_fetch_that_takes_too_long_brings_nothing() -> None:
    models = points(2)
    simulation = simulation_of(models, DPWA, speeds=[4.0, 4.0], links=Link(1, 3.0))
    simulation.run(lambda w: models[w].value.data.add_(w), seconds=6.0)
    assert [costs.rounds for costs in simulation.costs] == [0, 0]
    assert [costs.bytes_sent for costs in simulation.costs] == [0, 0]
    assert_close(models[1].value.detach(), full(24.0))


def test_a_worker_with_nan_takes_the_parameters_of_its_peer() -> None:
    """As in a real run: its own are not served, and not kept."""
    models = points(2)

    def local_step(worker: int) -> None:
        is_broken = simulation.steps == [2, 2]
        models[worker].value.data.add_(math.nan if is_broken else 1.0)

    simulation = simulation_of(models, DPWA, speeds=[1.0, 1.0])
    simulation.run(local_step, seconds=3.0)
    assert [bool(model.value.isfinite().all()) for model in models] == [False, True]
    simulation.run(local_step, seconds=1.0)
    assert all(bool(model.value.isfinite().all()) for model in models)
    lost = [one.statistics.lost_steps for one in simulation.participants]
    assert lost[0] > 0 == lost[1]


def test_workers_come_together_and_the_seed_decides() -> None:
    def spread(seed: int, probability: float) -> Tensor:
        models = points(6)
        simulation = simulation_of(
            models,
            {"fetch_probability": probability, "interpolation": "loss"},
            speeds=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            jitter=0.2,
            links="wan",
            compression="bf16",
            seed=seed,
        )

        def local_step(worker: int) -> float:
            models[worker].value.data.lerp_(full(float(worker)), 0.1)
            return 1.0 + worker

        simulation.run(local_step, seconds=40.0)
        return torch.stack(simulation.params())[:, 0]

    together, again, other = spread(0, 1.0), spread(0, 1.0), spread(1, 1.0)
    assert torch.equal(together, again)
    assert not torch.equal(together, other)
    alone = spread(0, 0.0)
    assert float(together.std()) < 0.5 * float(alone.std())


def test_what_cannot_work_is_refused(subtests: pytest.Subtests) -> None:
    pair = {"models": points(2), "given": {}, "speeds": [1.0, 1.0]}
    for given, message in (
        ({"models": points(1), "speeds": [1.0]}, "needs at least two models, got 1"),
        ({"speeds": [1.0]}, "speeds are the local steps per second"),
        ({"speeds": None}, "PairwiseAverage needs to know how long local steps take"),
        ({"links": ["wan", "wan", "lan"]}, "link has 3 entries"),
        ({"failures": [Failure(0, 1.0)]}, "simulated without failures"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            simulation_of(**{**pair, **given})
    with pytest.raises(ValueError, match="PairwiseAverage has no rounds. Give seconds"):
        simulation_of(**pair).run(lambda worker: None, num_rounds=1)


def test_a_warning_says_that_all_fetches_are_too_slow(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(BYTES * 8 / 2.6 / 1e6, 0.0)  # the default of fetch_timeout_s is 2.5 s
    models = points(2)
    simulation = simulation_of(models, DPWA, speeds=[1.0, 1.0], links=link)
    simulation.run(lambda w: None, seconds=100.0)
    assert [costs.rounds for costs in simulation.costs] == [0, 0]
    texts = [record.getMessage() for record in caplog.records]
    assert texts == 2 * [
        "None of the first 10 fetches has ended within fetch_timeout_s=2.5 s, so nothing was "
        "averaged yet. Raise fetch_timeout_s if 8.0 kB take longer on this network."
    ]
