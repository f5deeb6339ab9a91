"""What failures cost: closed forms, the simulation of events, and that of real engines."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from random import Random

import pytest
import torch

from lightning_loco import DiLoCo, Simulation
from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.costs import Link
from lightning_loco.simulation import Failure
from lightning_loco.simulation.failures import NOTICED_AFTER_S
from lightning_loco.syncer import DecoupledSettings, MergeSettings
from lightning_loco.tools.plan import failures as module
from lightning_loco.tools.plan.failures import (
    BATCHES,
    Failures,
    Learners,
    Members,
    Recovery,
    Restarts,
    Shares,
    outcomes,
)
from lightning_loco.tools.plan.planner import make_plan
from tests.harness.toys import Point
from tests.tools.plan.test_planner import job

HOUR = 3600.0
FAILURES = Failures(mtbf_h=100, restart_s=300, checkpoint_every_s=600, checkpoint_s=10, price=2.5)


def simulated(recovery: Recovery) -> tuple[Shares, float]:
    """Return the mean shares of all seeds, and the standard error of the goodput."""
    runs = [recovery.simulate(Random(seed), 1000).of_method() for seed in range(BATCHES)]
    shares = Shares(*map(statistics.fmean, zip(*runs, strict=True)))
    return shares, statistics.stdev(one.computing for one in runs) / math.sqrt(BATCHES)


# A member waits for others whose number changes; the closed form takes the mean number.
RECOVERIES: Sequence[tuple[Recovery, float]] = (
    (Restarts(100 * HOUR / 8, 300, 600, 10), 0.0),
    (Restarts(100 * HOUR / 1000, 300, 100, 10), 0.0),
    (Restarts(HOUR, 0, 2 * HOUR, 60), 0.0),
    (Learners(100 * HOUR, 300, 5, 0.5, 24), 0.0),
    (Learners(600, 30, 2, 10, 6), 0.0),
    (Learners(60, 30, 2, 50, 4), 0.0),
    (Members(8, 100 * HOUR, 300, 5, 15, 1, 5.5, True), 0.003),
    (Members(1000, 100 * HOUR, 300, 20, 15, 1, 6, True), 0.003),
    (Members(1000, 100 * HOUR, 300, 20, 5, 3, 4.8, False), 0.003),
    (Members(100_000, 100 * HOUR, 300, 20, 15, 1, 6, False), 0.003),
    (Members(4, 600, 30, 2, 10, 1, 5, True), 0.003),
    (Members(4, 600, 30, 2, 2, 4, 5, False), 0.003),
)


def test_the_simulation_has_the_goodput_of_the_closed_form(subtests: pytest.Subtests) -> None:
    for recovery, approximate in RECOVERIES:
        with subtests.test(recovery):
            shares, error = simulated(recovery)
            assert error < 0.01
            assert abs(shares.computing - recovery.goodput()) < 4 * error + approximate
            assert sum(shares) == pytest.approx(1.0)
            assert min(shares) >= 0


def test_restarts_by_hand() -> None:
    """Without checkpoint time and restarts: a job lives for the interval, or starts it again."""
    every = math.log(2) * HOUR
    assert Restarts(HOUR, 0, every, 1e-9).goodput() == pytest.approx(math.log(2))
    assert Restarts(HOUR, HOUR, every, 1e-9).goodput() == pytest.approx(math.log(2) / math.e)
    # A failure at 600 + 10 + 200 s loses 200 s; the next one comes while the job restarts.
    shares = Restarts(1.0, 30, 600, 10).simulate(Draws([30 + 810, 20, 30 + 605]), 3)
    assert shares == Shares(600, 10 + 5, 0, 200 + 600, 30 + 20 + 30)


class Draws(Random):
    """Given times between failures; the first worker fails."""

    def __init__(self, times_s: Sequence[float]) -> None:
        super().__init__(0)
        self._times_s = iter(times_s)

    def expovariate(self, lambd: float = 1.0) -> float:
        return next(self._times_s)

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        return 0


def test_the_best_interval_is_the_best_and_youngs_if_failures_are_rare() -> None:
    for mtbf_s, checkpoint_s in ((HOUR, 60), (100 * HOUR, 10), (60, 600)):
        best = Restarts(mtbf_s, 30, 1, checkpoint_s).with_best_interval()
        for factor in (0.9, 1.1):
            other = dataclasses.replace(best, every_s=factor * best.every_s)
            assert other.goodput() < best.goodput()
    best = Restarts(1e6 * HOUR, 30, 1, 10).with_best_interval()
    assert best.every_s == pytest.approx(math.sqrt(2 * 10 * 1e6 * HOUR), rel=1e-3)


def test_a_failure_of_members_and_learners_by_hand() -> None:
    """One of three members fails at 29 s: the exchange of 30 s ends 4 s later."""
    members = Members(3, HOUR, 30, 2, 10, 2, 5, waits_for_joining=False)
    # Of its two fragments one was sent at 20 s and one at 10 s.
    assert members.simulate(Draws([29]), 1) == Shares(2 * 3 * 10 - 5, 0, 0, 9 + 5, 0)
    # It is back at 61 s, and joins with the exchange at 64 s; another one fails at 95 s.
    shares = members.simulate(Draws([29, 1e6, 95 - 64]), 2)
    assert shares.waiting == 2 * 4
    assert shares.joining == 64 - 61 + 2
    assert shares.restarting == 30
    learners = Learners(HOUR, 30, 2, 10, 2)
    assert learners.simulate(Draws([29, 5]), 2) == Shares(15, 0, 4, 14 + 5, 60)


def test_members_are_those_of_the_simulation() -> None:
    """Per failure: the others wait until it is noticed, and the worker joins with a round."""
    life_s, restart_s, until_s, every = 300.0, 22.0, 5000.0, 10
    failed, back_s, draws = [], [0.0] * 4, Random(5)
    for worker in range(4):
        while (at_s := back_s[worker] + draws.expovariate(1 / life_s)) < until_s:
            back_s[worker] = at_s + restart_s
            failed.append(Failure(worker, at_s, back_s[worker]))
    models = [Point(torch.zeros(1)) for _ in range(4)]
    simulation = Simulation(
        models, DiLoCo(outer_momentum=0.5), sync_every=every, speeds=[1.0] * 4, failures=failed
    )
    simulation.run(lambda worker: None, seconds=until_s)
    found = [
        sum(getattr(one, f"{name}_s") for one in simulation.costs) / len(failed)
        for name in ("wait", "join", "away")
    ]
    members = Members(4, life_s, restart_s, 0, every, 1, NOTICED_AFTER_S, waits_for_joining=True)
    _, waiting, joining, _, restarting = (one / 1000 for one in members.simulate(draws, 1000))
    assert len(failed) >= 40
    assert found == [
        pytest.approx(waiting, abs=1.5),
        pytest.approx(joining, abs=1.5),
        pytest.approx(restarting, abs=1.0),
    ]


def test_learners_are_those_of_the_simulation() -> None:
    life_s, restart_s, until_s = 100.0, 20.0, 1500.0
    failed, draws = [], Random(1)
    for worker in range(3):
        back_s = 0.0
        while (at_s := back_s + draws.expovariate(1 / life_s)) < until_s:
            back_s = at_s + restart_s
            failed.append(Failure(worker, at_s, back_s))
    settings = DecoupledSettings(DecoupledDiLoCo(), MergeSettings(4, 12))
    models = [Point(torch.zeros(8)) for _ in range(3)]
    links = Link(math.inf, 0.01)
    simulation = Simulation.from_settings(
        models, settings, speeds=[1.0] * 3, failures=failed, links=links
    )
    simulation.run(lambda worker: None, seconds=until_s)
    found = statistics.fmean(one.merged + one.pending for one in simulation.goodput)
    alive_s = sum(one.compute_s for one in simulation.costs)
    learners = Learners(alive_s / len(failed), restart_s, 4 * 0.02, 3, 4)
    assert len(failed) > 30
    # The local step until a result arrives is lost in each of 12.
    assert found == pytest.approx(learners.goodput() * 11 / 12, abs=0.03)


def test_outcomes_of_a_plan() -> None:
    plan = make_plan(job("wan", num_workers=8, tokens=10**10))
    found = {one.title: one for one in outcomes(plan, FAILURES)}
    assert plan.chosen.candidate.title in list(found)[2]
    ddp, best, rounds, rounds_best, elastic, learners = found.values()
    assert ddp.title == "DDP, every 10.0 min"
    assert best.expected > ddp.expected
    assert elastic.shares.computing > rounds_best.shares.computing > rounds.shares.computing
    assert learners.shares.waiting == 0
    for one in found.values():
        assert abs(one.shares.computing - one.expected) < 4 * one.error + 0.003
        rate = 8 * 16_384 / 0.5 * one.shares.computing
        assert one.billion_tokens_s == pytest.approx(1e9 / rate)
        assert one.cost == pytest.approx(2.5 * 8 * one.billion_tokens_s / HOUR)
    assert outcomes(plan, FAILURES) == list(found.values())
    hopeless = dataclasses.replace(FAILURES, mtbf_h=0.01)
    assert outcomes(plan, hopeless)[0].billion_tokens_s == math.inf


def test_without_failures_only_steps_that_results_replace_are_lost() -> None:
    """Streaming and async DiLoCo keep a quarter of them; blocking rounds replace none."""
    never = dataclasses.replace(FAILURES, mtbf_h=1e9, checkpoint_every_s=1e7)
    for link, kept in (("lan", 0.25), (Link(50), 0.25), (Link(1400), None)):
        plan = make_plan(job(link))
        ddp, _, rounds, _, elastic, learners = (one.shares for one in outcomes(plan, never))
        chosen, decoupled = plan.chosen, plan.options[-2]
        assert (chosen.delay > 0) == (kept is not None)
        lost = 0.0 if kept is None else (1 - kept) * chosen.delay / chosen.sync_every
        for shares in (rounds, elastic):
            assert shares.lost == pytest.approx(lost * chosen.utilisation, abs=1e-4)
            assert shares.waiting == pytest.approx(1 - chosen.utilisation, abs=1e-4)
        assert learners.lost == pytest.approx(decoupled.delay / decoupled.sync_every, abs=1e-4)
        assert ddp.lost == pytest.approx(0, abs=1e-4)
        assert ddp.waiting == pytest.approx(1 - plan.options[0].utilisation, abs=1e-4)


def test_numbers_are_those_of_the_simulation_and_bad_ones_are_named(
    subtests: pytest.Subtests,
) -> None:
    assert module.NOTICED_AFTER_S == NOTICED_AFTER_S
    for changes, message in (
        ({"mtbf_h": 0.0}, r"--mtbf-h must be from 0.001 to 1e\+09, got 0"),
        ({"restart_s": -1.0}, r"--restart-s must be from 0 to 1e\+09, got -1"),
        ({"checkpoint_every_s": math.inf}, "--checkpoint-every-s must be from 0.001 .* got inf"),
        ({"checkpoint_s": math.nan}, "--checkpoint-s must be from 0.001 .* got nan"),
        ({"price": -2.5}, "--price must be from 0 .* got -2.5"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            dataclasses.replace(FAILURES, **changes)
