"""Schedules: when rounds start and end; and a user's schedule with two fragments."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Simulation
from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC, LocalSGD, ModelAverage
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps, StepInfo
from tests.harness.pool import Pool, run_each
from tests.harness.rounds import (
    LARGE,
    SMALL_BUCKET,
    Counting,
    Halves,
    SignBlocks,
    approach,
    simulate,
    train,
    zeros,
)
from tests.harness.small_model import flat
from tests.harness.toys import Point, assert_close, randn

ROUNDS = 5
MIDDLE = LARGE // 2


@dataclasses.dataclass
class Pending:
    """A pending round whose result has arrived or not."""

    arrived: bool

    def has_arrived(self) -> bool:
        return self.arrived


def step_info(steps: int, since: int, idle_s: float = math.inf, pending: Any = None) -> StepInfo:
    return StepInfo(steps, since, 1, 0, idle_s, pending)


# ------------------------------------------------------------------ the schedules of the package


def test_every_steps_ends_a_pending_round_when_the_next_one_begins(
    subtests: pytest.Subtests,
) -> None:
    schedule = EverySteps(3, overlap=True)
    for since, pending, expected in (
        (2, None, (False, False)),
        (3, None, (True, False)),
        (2, Pending(True), (False, False)),
        (3, Pending(False), (True, True)),
        (5, Pending(True), (True, True)),
    ):
        with subtests.test(since=since, pending=pending):
            assert schedule.due(step_info(10, since, pending=pending)) == expected


def test_every_interval_begins_after_a_pause_and_ends_when_the_result_has_arrived(
    subtests: pytest.Subtests,
) -> None:
    schedule = EveryInterval(0.5, warmup_steps=5)
    for steps, idle_s, pending, expected in (
        (4, math.inf, None, (False, False)),  # still warming up
        (5, math.inf, None, (True, False)),
        (5, 0.4, None, (False, False)),
        (5, 0.5, None, (True, False)),
        (5, 9.0, Pending(False), (False, False)),
        (5, 0.0, Pending(True), (False, True)),
    ):
        with subtests.test(steps=steps, idle_s=idle_s, pending=pending):
            assert schedule.due(step_info(steps, steps, idle_s, pending)) == expected


def test_which_rounds_are_overlapped(subtests: pytest.Subtests) -> None:
    for schedule, is_overlapped in (
        (EverySteps(3), [False] * 3),
        (EverySteps(3, overlap=True), [False, True, True]),
        (EverySteps(3, overlap=True, warm_start=False), [True] * 3),
        (EveryInterval(), [True] * 3),
    ):
        with subtests.test(repr(schedule)):
            assert [schedule.is_overlapped(index) for index in range(3)] == is_overlapped


def test_a_list_gives_each_worker_its_steps_and_its_share_of_the_data() -> None:
    schedule = EverySteps([2, 4, 6])
    schedule.check(3)
    assert [schedule.of_worker(worker) for worker in range(3)] == list(map(EverySteps, (2, 4, 6)))
    assert schedule.shares(3) == [1, 2, 3]
    assert (EverySteps(7).shares(3), EveryInterval().shares(3)) == ([1, 1, 1], [1, 1, 1])
    assert (schedule.sync_every_of(1), EveryInterval().sync_every_of(1)) == (4, None)
    with pytest.raises(ValueError, match="lists 3 numbers for 2 workers"):
        schedule.check(2)


def test_describe_and_str() -> None:
    assert EverySteps((2, 4)).describe() == {
        "sync_every": [2, 4],
        "overlap": False,
        "warm_start": True,
    }
    assert EveryInterval(0.5).describe() == {"interval_s": 0.5, "warmup_steps": 0}
    assert str(EverySteps(3)) == "a round every 3 local steps"
    assert str(EverySteps(1)) == "a round every local step"
    late = "a round every 3 local steps, applied one round later"
    assert str(EverySteps(3, overlap=True)) == late
    assert str(Halves(3)) == "a round every 3 local steps"
    assert str(EveryInterval(0.5)) == "a round after every 0.5 s, 0 steps of warm-up"
    assert EverySteps().fragment_slices({"a": 3, "b": 4}) == [[range(7)]]


# ---------------------------------------------------------------- a schedule with two fragments


def averaged_by_halves() -> Tensor:
    """Compute local SGD of three workers, one half at a time: ``(ROUNDS + 1, N, P)``."""
    params = [torch.zeros(LARGE, dtype=torch.float64) for _ in range(3)]
    targets = [randn(LARGE, seed=10 * worker) for worker in range(3)]
    halves = [slice(0, MIDDLE), slice(MIDDLE, LARGE)]
    history = []

    def average(half: slice) -> None:
        mean = torch.stack([p[half] for p in params]).mean(0)
        for p in params:
            p[half] = mean

    for t in range(ROUNDS):
        for p, target in zip(params, targets, strict=True):
            for _ in range(2):
                p.add_(target - p, alpha=0.1)
        average(halves[t % 2])
        history.append(torch.stack(params))
    average(halves[ROUNDS % 2])  # the final average
    return torch.stack([*history, torch.stack(params)])


def test_halves_alternate_and_the_end_averages_both(pool: Pool) -> None:
    settings = RoundSettings(LocalSGD(), Halves(2))
    expected = averaged_by_halves()
    assert MIDDLE % 4 == 0
    assert_close(simulate(settings, 3, ROUNDS), expected)
    assert_close(torch.stack(pool.run(train, settings, ROUNDS, world=3), dim=1), expected)
    assert torch.equal(expected[-1, 0], expected[-1, 1])
    assert not torch.equal(expected[-2, 0], expected[-2, 1])


@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    [
        pytest.param(DiLoCo(), False, id="diloco"),
        pytest.param(Counting(), False, id="counting"),
        pytest.param(SignBlocks(), False, id="sign_blocks", marks=pytest.mark.soak),
        pytest.param(GASLoC(), False, id="gasloc", marks=pytest.mark.soak),
        pytest.param(DiLoCo(0.7, 0.0), True, id="late diloco"),
        pytest.param(ModelAverage(), True, id="late average", marks=pytest.mark.soak),
        pytest.param(GASLoC(), True, id="late gasloc"),
    ],
)
def test_any_algorithm_works_with_fragments(
    pool: Pool, algorithm: Algorithm, overlap: bool, subtests: pytest.Subtests
) -> None:
    """The same numbers in processes and in the simulation, and an exact resume."""
    settings = RoundSettings(algorithm, Halves(2, overlap))
    expected = simulate(settings, 2, ROUNDS)
    calls = {after: (settings, ROUNDS, zeros, after) for after in (None, 2, 3)}
    results = run_each(pool, train, calls, world=2)
    unbroken = torch.stack(results.pop(None), dim=1)
    assert_close(unbroken, expected)
    for resume_after, resumed in results.items():
        with subtests.test(resume_after=resume_after):
            assert torch.equal(torch.stack(resumed, dim=1), unbroken)


def watch_halves(rank: int, world: int) -> list[tuple[bool, bool]]:
    model = Point(torch.zeros(LARGE, dtype=torch.float64))
    settings = RoundSettings(LocalSGD(), Halves(1), bucket_bytes=SMALL_BUCKET)
    engine = Engine.from_settings(model, settings)
    assert [len(rounds.memory.buckets) for rounds in engine.fragments] == [3, 3]
    moved = []
    for _ in range(3):
        approach(rank, model)
        before = flat(model)
        engine.step()
        changed = flat(model) != before
        moved.append((bool(changed[:MIDDLE].any()), bool(changed[MIDDLE:].any())))
    engine.close()
    return moved


def test_each_round_changes_one_half_only(pool: Pool) -> None:
    for moved in pool.run(watch_halves, world=2):
        assert moved == [(True, False), (False, True), (True, False)]


def finish_halves(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for sync_every in (100, 2, 1):
        model = zeros()
        schedule = Halves(sync_every)
        engine = Engine.from_settings(model, RoundSettings(DiLoCo(1.0, 0.0), schedule))
        for _ in range(3):
            model.value.data.add_(rank + 1.0)
            engine.step()
        engine.finish()
        engine.close()
        found[repr(schedule)] = flat(model)
    return found


def test_finish_averages_the_progress_since_the_last_round_in_both_halves(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """After no round, after one of the first half, and after rounds of both halves."""
    expected = torch.full((LARGE,), 6.0, dtype=torch.float64)
    results = pool.run(finish_halves, world=3)
    assert len(results[0]) == 3
    for schedule in results[0]:
        with subtests.test(schedule):
            for found in results:
                assert_close(found[schedule], expected)


def test_a_simulation_without_speeds_refuses_a_schedule_by_the_clock() -> None:
    settings = RoundSettings(ModelAverage(), EveryInterval())
    with pytest.raises(ValueError, match="ModelAverage needs to know how long local steps take"):
        Simulation.from_settings([zeros()], settings)
