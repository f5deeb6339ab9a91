"""Local steps between rounds that are proportional to speed, or change during a run."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import CommunicationMonitor, DiLoCo, DiLoCoStrategy, LocoStrategy, StepEngine
from lightning_loco.algorithms import Algorithm, GASLoC
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EverySteps, StepInfo, VaryingSteps, by_steps, steps_by_speed
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.rounds import approach, simulate, train, zeros
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.harness.toys import assert_close

VARYING = {0: 2, 5: 4, 14: 1}
STEPS_OF_ROUNDS = [2, 2, 2, 4, 4, 1, 1]  # they start at steps 0, 2, 4, 6, 10, 14, 15
ENDS = [2, 4, 6, 10, 14, 15, 16]
ROUNDS = len(ENDS)


def by_hand(sync_every: dict[int, int], rounds: int) -> list[int]:
    """Return the local steps of each round, computed round by round."""
    begin, found = 0, []
    for _ in range(rounds):
        steps = sync_every[max(step for step in sync_every if step <= begin)]
        found.append(steps)
        begin += steps
    return found


def test_a_round_has_the_number_of_steps_that_holds_at_its_start(subtests: pytest.Subtests) -> None:
    for sync_every in (
        VARYING,
        {0: 3},
        {0: 10, 1000: 50},
        {0: 7, 1: 2, 2: 3, 30: 1},  # the second and third ones have no effect
        {0: 1, 4: 5, 20: 2, 21: 9, 100: 1},
    ):
        for worker in (0, 3):
            with subtests.test(sync_every=sync_every, worker=worker):
                schedule = VaryingSteps(sync_every)
                found = [schedule.steps_of_round(worker, index) for index in range(150)]
                assert found == by_hand(sync_every, 150)


def test_the_constants_of_this_module() -> None:
    assert by_hand(VARYING, ROUNDS) == STEPS_OF_ROUNDS
    assert list(itertools.accumulate(STEPS_OF_ROUNDS)) == ENDS


class Pending:
    def has_arrived(self) -> bool:
        return True


def test_a_pending_round_ends_when_the_next_one_begins() -> None:
    schedule = VaryingSteps(VARYING, overlap=True)
    for index, steps in enumerate(STEPS_OF_ROUNDS):
        for since in range(1, steps + 1):
            due = since == steps
            assert schedule.due(StepInfo(99, since, index, 0, 0.0, None)) == (due, False)
            assert schedule.due(StepInfo(99, since, index, 0, 0.0, Pending())) == (due, due)
    assert [schedule.is_overlapped(index) for index in range(3)] == [False, True, True]
    assert [VaryingSteps(VARYING).is_overlapped(index) for index in range(3)] == [False] * 3


def test_positions_at_which_to_stop_ascend() -> None:
    """Also from the end of a short round to the start of a long one."""
    schedule = VaryingSteps({0: 2, 4: 50, 100: 3})
    positions = [
        index + Fraction(since + 1, schedule.positions_in_round(index))
        for index in range(8)
        for since in range(1, schedule.steps_of_round(0, index) + 1)
    ]
    assert positions == sorted(set(positions))


def test_by_steps_takes_a_mapping() -> None:
    assert by_steps(VARYING, True, False) == VaryingSteps(VARYING, True, False)
    assert by_steps([2, 3], True, False) == EverySteps([2, 3], True, False)
    strategy = DiLoCoStrategy({10: 5, 0: 2})
    assert strategy.settings.schedule == VaryingSteps({0: 2, 10: 5})
    assert strategy.settings.describe()["sync_every"] == {"0": 2, "10": 5}
    assert strategy.settings.schedule.shares(3) == [1, 1, 1]
    assert str(strategy.schedule) == (
        "rounds by local steps: every 2 from step 0 on, every 5 from step 10 on"
    )


# ------------------------------------------------------------------------------- in rounds


def steps_of_rounds(rank: int, world: int, sync_every: Any) -> list[int]:
    model = zeros()
    engine = StepEngine(model, DiLoCo(), sync_every=sync_every)
    found = []
    for step in range(1, 18):
        approach(rank, model)
        if engine.step():
            found.append(step)
    engine.close()
    return found


def test_rounds_have_the_given_steps_in_processes(pool: Pool) -> None:
    for found in pool.run(steps_of_rounds, VARYING, world=3):
        assert found == [*ENDS, 17]


@pytest.mark.parametrize("algorithm", [DiLoCo(0.7, 0.2), GASLoC()], ids=["mean", "gossip"])
def test_the_same_numbers_in_processes_and_the_simulation_and_an_exact_resume(
    pool: Pool, algorithm: Algorithm, subtests: pytest.Subtests
) -> None:
    for overlap in (False, True):
        with subtests.test(overlap=overlap):
            settings = RoundSettings(algorithm, VaryingSteps(VARYING, overlap))
            expected = simulate(settings, 2, ROUNDS)
            rows = {after: (settings, ROUNDS, zeros, after) for after in (None, 3, 4)}
            unbroken, *others = run_each(pool, train, rows, world=2).values()
            assert_close(torch.stack(unbroken, dim=1), expected)
            assert all(torch.equal(torch.stack(one), torch.stack(unbroken)) for one in others)


def test_a_constant_mapping_is_every_steps(pool: Pool) -> None:
    results = []
    for schedule in (VaryingSteps({0: 2}, overlap=True), EverySteps(2, overlap=True)):
        settings = RoundSettings(DiLoCo(0.7, 0.2), schedule)
        results.append(torch.stack(pool.run(train, settings, 5, world=2)))
    assert torch.equal(*results)


def local_sgd_by_hand(world: int) -> Tensor:
    """Compute all rounds of local SGD by hand."""
    models = [zeros() for _ in range(world)]
    history = []
    for steps in STEPS_OF_ROUNDS:
        for worker, model in enumerate(models):
            for _ in range(steps):
                approach(worker, model)
        mean = torch.stack([flat(model) for model in models]).mean(0)
        for model in models:
            model.value.data.copy_(mean)
        history.append(mean)
    return torch.stack([*history, mean])


def test_it_equals_a_loop_by_hand() -> None:
    history = simulate(RoundSettings(DiLoCo(1.0, 0.0), VaryingSteps(VARYING)), 3, ROUNDS)
    assert_close(history, local_sgd_by_hand(3)[:, None].expand(-1, 3, -1))


def stop(rank: int, world: int, overlap: bool) -> tuple[str | None, int]:
    """Train workers of different speed; one must stop where rounds become longer."""
    model = zeros()
    engine = StepEngine(model, DiLoCo(0.7, 0.2), sync_every={0: 2, 30: 25}, overlap=overlap)
    for step in range(1000):
        if rank == 1 and step == 27:
            engine.worker.stop.request("SIGTERM")
        approach(rank, model)
        time.sleep(0.01 + 0.01 * rank)
        engine.step()
        if engine.worker.stop_agreed is not None:
            break
    engine.finish()
    engine.close()
    return engine.worker.stop_agreed, engine.worker.steps


@pytest.mark.parametrize("overlap", [False, True])
def test_all_stop_at_the_same_step(pool: Pool, overlap: bool) -> None:
    results = pool.run(stop, overlap, world=3)
    assert len(set(results)) == 1
    reason, steps = results[0]
    assert reason == "SIGTERM"
    assert 27 < steps < 1000


# ----------------------------------------------------------------------------- in a Trainer


class Recorder(CommunicationMonitor):
    """Records logged values."""

    def __init__(self) -> None:
        super().__init__(prog_bar=True)
        self.found: list[tuple[float, float]] = []

    def metrics(self, strategy: Any) -> dict[str, float]:
        found = super().metrics(strategy)
        self.found.append((found["loco/round"], found["loco/sync_every"]))
        return found


def fit(rank: int, world: int, batches: list[int]) -> tuple[list[tuple[float, float]], Tensor]:
    monitor, module = Recorder(), TinyModule()
    strategy = LocoStrategy(DiLoCo(), sync_every=VARYING)
    trainer = make_trainer(
        strategy, max_epochs=2, callbacks=[monitor], use_distributed_sampler=False
    )
    trainer.fit(module, make_loader(rank, batches[rank]))
    return monitor.found, torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_sync_every_is_logged(pool: Pool) -> None:
    for found, _ in pool.run(fit, [8, 8], world=2):
        following = enumerate(STEPS_OF_ROUNDS[1:])
        assert found == [(index + 1, steps) for index, steps in following]


def test_a_worker_with_less_data_takes_part_in_all_rounds(pool: Pool) -> None:
    """The others finish more epochs, and all workers end with the same model."""
    (few, first), (many, second) = pool.run(fit, [6, 8], world=2)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert many[-1][0] >= len(few)


# ------------------------------------------------------------------------------ refusals


def test_invalid_mappings_are_refused(subtests: pytest.Subtests) -> None:
    for sync_every, error, message in (
        ({}, ValueError, r"must begin at step 0 .* got \{\}"),
        ({5: 10}, ValueError, r"must begin at step 0 .* got \{5: 10\}"),
        ({-1: 3, 0: 10}, ValueError, "must begin at step 0"),
        ({0: 10, 20: 0}, ValueError, "at least 1 local step between rounds"),
        ({0: 2.5}, TypeError, r"both integers, got \{0: 2.5\}"),
        ({0: 2, 1.5: 3}, TypeError, "both integers"),
        ({0: True}, TypeError, "both integers"),
        ({0: [2, 3]}, TypeError, r"both integers, got \{0: \[2, 3\]\}"),
        ({"0": 10}, TypeError, r"both integers, got \{'0': 10\}"),
    ):
        with subtests.test(sync_every=sync_every), pytest.raises(error, match=message):
            DiLoCoStrategy(sync_every=sync_every)
    with pytest.raises(TypeError, match=r"must be a mapping such as \{0: 10, 1000: 50\}, got 10"):
        VaryingSteps(10)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ steps by speed


def test_the_fastest_worker_makes_sync_every_steps_and_others_their_share(
    subtests: pytest.Subtests,
) -> None:
    for speeds, sync_every, expected in (
        ([4.1, 4.0, 1.0], 50, [50, 48, 12]),
        ([1.0], 7, [7]),
        ([2, 2, 2], 10, [10, 10, 10]),
        ([0.1, 0.3], 3, [1, 3]),  # 0.1 / 0.3 * 3 is a little below 1 in floating point
        ([1e-6, 1.0], 100, [1, 100]),  # at least one step
    ):
        with subtests.test(speeds=speeds, sync_every=sync_every):
            assert steps_by_speed(speeds, sync_every) == expected
            assert steps_by_speed([speed * 3.7 for speed in speeds], sync_every) == expected


def test_no_worker_waits_for_a_slower_one_by_more_than_a_step() -> None:
    speeds = [3.0, 2.3, 1.1, 0.7]
    steps = steps_by_speed(speeds, 40)
    seconds = [count / speed for count, speed in zip(steps, speeds, strict=True)]
    for took, speed in zip(seconds, speeds, strict=True):
        assert 0 <= max(seconds) - took < 1 / speed
    EverySteps(steps).check(4)


def test_invalid_speeds_are_refused(subtests: pytest.Subtests) -> None:
    for speeds, sync_every, message in (
        ([], 10, r"speeds must be positive, one per worker, got \[\]"),
        ([1.0, 0.0], 10, r"speeds must be positive, one per worker, got \[1.0, 0.0\]"),
        ([1.0, float("nan")], 10, "speeds must be positive"),
        ([1.0, float("inf")], 10, "speeds must be positive"),
        ([1.0], 0, "sync_every must be at least 1, got 0"),
    ):
        with (
            subtests.test(speeds=speeds, sync_every=sync_every),
            pytest.raises(ValueError, match=message),
        ):
            steps_by_speed(speeds, sync_every)
