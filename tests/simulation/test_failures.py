"""Workers that die and return: who takes part, from which parameters, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, Simulation
from lightning_loco.algorithms import DelayedNesterov, KeepProgress, ModelAverage
from lightning_loco.costs import Link
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps, hidden_rounds
from lightning_loco.simulation import Failure, random_failures
from tests.harness.toys import Point, assert_close, states_of

EVERY = 10
SPEEDS = [1.0] * 4
"""A round takes 10 s."""


def points(num_workers: int = 4) -> list[Point]:
    return [Point(torch.zeros(3, dtype=torch.float64)) for _ in range(num_workers)]


def added_by(workers: list[int]) -> float:
    """Return the mean of the values that workers add in a round."""
    return sum(worker + 1 for worker in workers) / len(workers)


def add_own_number(models: list[Point], worker: int) -> None:
    models[worker].value.data.add_((worker + 1) / EVERY)


class Run:
    """A simulation whose worker w adds w + 1 to its parameters in each round."""

    def __init__(
        self, algorithm: Any, failures: list[Failure], num_workers: int = 4, **others: Any
    ) -> None:
        self.models = points(num_workers)
        settings = {"sync_every": EVERY, "speeds": [1.0] * num_workers, **others}
        self.simulation = Simulation(self.models, algorithm, failures=failures, **settings)
        self.returned: list[tuple[int, Tensor]] = []

    def go(self, num_rounds: int) -> Run:
        self.simulation.run(
            lambda worker: add_own_number(self.models, worker),
            num_rounds,
            on_return=lambda worker: self.returned.append((worker, self.value(worker))),
        )
        return self

    def value(self, worker: int) -> Tensor:
        return self.models[worker].value.detach().clone()


def full(value: float) -> Tensor:
    return torch.full((3,), value, dtype=torch.float64)


def test_the_mean_is_over_those_that_are_present() -> None:
    """Worker 3 adds 4 in a round of 10 s, dies in the second one; the others wait 5 s for it."""
    run = Run(LocalSGD(), [Failure(3, at_s=14.0)]).go(3)
    for worker in range(3):
        assert_close(run.value(worker), full(2.5 + 2.0 + 2.0))
    # Its death is detected at 19 s, when the others are not ready yet.
    assert run.simulation.time_s == pytest.approx([30.0, 30.0, 30.0, 14.0])
    assert run.simulation.round_index == 3
    assert [costs.rounds for costs in run.simulation.costs] == [3, 3, 3, 1]
    assert_close(run.simulation.consensus(), full(6.5))


def test_rounds_wait_until_the_death_is_noticed() -> None:
    run = Run(LocalSGD(), [Failure(3, at_s=18.0, noticed_after_s=5.0)]).go(3)
    assert run.simulation.time_s == pytest.approx([33.0, 33.0, 33.0, 18.0])
    waits = [e for e in run.simulation.timeline if e.kind == "wait" and e.worker == 0]
    assert [(event.start_s, event.end_s) for event in waits] == [(20.0, 23.0)]


def test_a_round_under_way_is_repeated_by_the_others() -> None:
    """All messages are in transit from 10 s on, for 12 s, when worker 3 dies."""
    link = Link(1e9, 2.0)  # 6 hops of a ring of four, 4 of a ring of three
    run = Run(LocalSGD(), [Failure(3, at_s=15.0)], links=link).go(1)
    assert run.simulation.time_s == pytest.approx([20.0 + 4 * 2.0] * 3 + [15.0])
    assert_close(run.value(0), full(2.0))
    later = Run(LocalSGD(), [Failure(3, at_s=22.5)], links=link).go(1)
    assert_close(later.value(0), full(2.5))  # the round had ended


def test_a_worker_that_returns_ends_equal_to_the_others(subtests: pytest.Subtests) -> None:
    """It takes part in the round at 40 s with weight 0, and in the next one with its weight."""
    failures = [Failure(3, at_s=14.0, back_s=35.0)]
    for algorithm in (LocalSGD(), DiLoCo(), DiLoCo(0.5, 0.9, nesterov=False)):
        with subtests.test(str(algorithm)):
            run = Run(algorithm, failures).go(4)
            values = [run.value(worker) for worker in range(4)]
            for value in values:
                assert torch.equal(value, values[0])
            assert [worker for worker, _ in run.returned] == [3]
            assert torch.equal(run.returned[0][1], values[0])
            without = Run(algorithm, [Failure(3, at_s=14.0)]).go(4)
            assert torch.equal(values[0], without.value(0))
            before = values[0].clone()
            run.go(1)
            if isinstance(algorithm, LocalSGD):
                assert_close(run.value(3), before + 2.5)
            for worker in range(4):
                assert torch.equal(run.value(worker), run.value(0))
            states = states_of(run.simulation)
            for key, entry in states[0].items():
                if isinstance(entry, Tensor):
                    assert torch.equal(states[3][key], entry)


def test_a_worker_that_returns_joins_overlapped_rounds(subtests: pytest.Subtests) -> None:
    rows = {
        "overlap": EverySteps(EVERY, overlap=True, warm_start=False),
        "fragments": hidden_rounds(EVERY, fragments=2),
    }
    for name, schedule in rows.items():
        with subtests.test(name):
            models = points()
            policy = KeepProgress() if name == "fragments" else None
            settings = RoundSettings(DiLoCo(0.5, 0.3), schedule, merge_policy=policy)
            simulation = Simulation.from_settings(
                models, settings, speeds=SPEEDS, failures=[Failure(1, at_s=24.0, back_s=48.0)]
            )
            simulation.run(lambda w: add_own_number(models, w), 13)  # noqa: B023
            simulation.drain()
            outer = [engine.outer() for engine in simulation.participants]
            assert all(torch.equal(one, outer[0]) for one in outer)
            assert simulation.costs[1].rounds < simulation.costs[0].rounds


def test_a_worker_that_returns_waits_for_the_state_on_its_link() -> None:
    link = Link(1.0, 0.0)
    failures = [Failure(3, at_s=14.0, back_s=35.0)]
    run = Run(LocalSGD(), failures, links=link).go(4)
    assert run.simulation.time_s[3] > run.simulation.time_s[0]


def test_a_worker_that_dies_before_it_has_joined_stays_away() -> None:
    """It returns at 23 s, and the next round is at 30 s."""
    failures = [Failure(3, 14.0, 23.0), Failure(3, 25.0, 62.0)]
    run = Run(LocalSGD(), failures).go(5)
    assert run.returned == []
    assert_close(run.value(0), full(2.5 + 4 * 2.0))
    run.go(3)
    assert [worker for worker, _ in run.returned] == [3]
    assert torch.equal(run.value(3), run.value(0))
    away = [e for e in run.simulation.timeline if e.kind == "away"]
    assert [(e.start_s, e.end_s) for e in away] == [(14.0, 23.0), (25.0, 62.0)]


def test_a_worker_joins_when_the_others_stop_to_wait_for_a_dead_one() -> None:
    """Workers 0 and 1 are ready at 10 s, and detect at 13.5 s that worker 3 is dead."""
    failures = [Failure(2, 1.0, 8.0), Failure(3, 8.5)]
    run = Run(LocalSGD(), failures).go(1)
    assert run.simulation.time_s == pytest.approx([13.5, 13.5, 13.5, 8.5])
    for worker in range(3):
        assert_close(run.value(worker), full(1.5))


def test_a_worker_is_back_before_the_round_in_which_it_died_has_ended() -> None:
    """Worker 3 dies at 11 s, when it waits for worker 0, which needs 20 s, and is back at 17 s."""
    failures = [Failure(3, at_s=11.0, back_s=17.0)]
    run = Run(LocalSGD(), failures, speeds=[0.5, 1.0, 1.0, 1.0]).go(3)
    assert [worker for worker, _ in run.returned] == [3]
    assert_close(run.returned[0][1], full(added_by([0, 1, 2])))  # with weight 0
    for worker in range(4):
        assert_close(run.value(worker), full(added_by([0, 1, 2]) + 2 * added_by([0, 1, 2, 3])))


def test_draining_admits_no_worker() -> None:
    models = points()
    simulation = Simulation(
        models,
        DiLoCo(0.5, 0.0),
        sync_every=EVERY,
        overlap=True,
        warm_start=False,
        speeds=[1.0, 1.0, 1.0, 0.9],
        failures=[Failure(1, at_s=4.0, back_s=38.0)],
    )
    simulation.run(lambda w: add_own_number(models, w), seconds=39.5)
    simulation.drain()
    outer = [engine.outer() for engine in simulation.participants]
    assert torch.equal(outer[0], outer[2])
    assert torch.equal(outer[0], outer[3])
    simulation.run(lambda w: add_own_number(models, w), num_rounds=2)
    simulation.drain()
    outer = [engine.outer() for engine in simulation.participants]
    assert all(torch.equal(one, outer[0]) for one in outer)


def test_all_dead_is_an_error() -> None:
    failures = [Failure(worker, at_s=14.0) for worker in range(4)]
    with pytest.raises(RuntimeError, match="All workers are dead at 19 s, and the state"):
        Run(LocalSGD(), failures).go(3)


def test_methods_that_elastic_members_refuse_are_refused(subtests: pytest.Subtests) -> None:
    failures = [Failure(0, 1.0)]
    by_time = RoundSettings(ModelAverage(), EveryInterval(1.0))
    for settings, message in (
        (by_time, "rounds must come after a fixed number of local steps"),
        (
            RoundSettings(DiLoCo(aggregate="geometric_median")),
            "an algorithm that averages over all workers",
        ),
        (RoundSettings(GASLoC()), "averages over all workers, got GASLoC"),
        (
            RoundSettings(DiLoCo(), hidden_rounds(8, 2, 8), merge_policy=KeepProgress()),
            "a result must be applied before the next round starts",
        ),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            Simulation.from_settings(points(), settings, speeds=SPEEDS, failures=failures)
    Simulation(points(), DelayedNesterov(), sync_every=2, speeds=SPEEDS, failures=failures)


def test_invalid_failures_are_refused(subtests: pytest.Subtests) -> None:
    for failures, message in (
        (lambda: [Failure(-1, 1.0)], "a worker from 0 on"),
        (lambda: [Failure(0, -1.0)], "times in seconds, at least 0"),
        (lambda: [Failure(0, 10.0, 12.0)], "noticed that it was dead, at 15 s or later"),
        (lambda: [Failure(4, 1.0)], "failures name worker 4, but there are 4 workers"),
        (lambda: [Failure(0, 1.0), Failure(0, 2.0)], "Worker 0 is dead already at 2 s"),
        (lambda: random_failures(2, 0.0, 1.0, 1.0), "until_s is in seconds, positive"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            Run(LocalSGD(), failures())


def test_random_failures_follow_the_seed_and_do_not_overlap() -> None:
    failures = random_failures(8, 1000.0, 100.0, 20.0, seed=1)
    assert failures == random_failures(8, 1000.0, 100.0, 20.0, seed=1)
    assert failures != random_failures(8, 1000.0, 100.0, 20.0, seed=2)
    assert 40 < len(failures) < 90  # each of 8 workers fails about every 125 s
    run = Run(LocalSGD(), [f for f in failures if f.worker < 4]).go(30)
    assert run.simulation.round_index == 30
    alive = [
        run.value(w) for w in range(4) if run.simulation.participants[w].worker.round_index == 30
    ]
    assert len(alive) > 1
    assert all(torch.equal(value, alive[0]) for value in alive)
