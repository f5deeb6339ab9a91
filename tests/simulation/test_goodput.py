"""What workers say of their own time is what the simulation says of it, by one definition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_loco import StepEngine
from lightning_loco.algorithms import DecoupledDiLoCo, DiLoCo, KeepProgress, LocalSGD, Mix, Restart
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Staggered
from lightning_loco.simulation import Simulation
from lightning_loco.syncer import DecoupledSettings, MergeSettings
from tests.harness.pool import Pool
from tests.harness.toys import Layers, Point


def points(count: int) -> list[Point]:
    return [Point(torch.zeros(12, dtype=torch.float64)) for _ in range(count)]


def parts_of(simulation: Simulation, worker: int) -> dict[str, float]:
    goodput = simulation.participants[worker].statistics.goodput
    assert goodput is not None
    return goodput.parts


def adding(models: list[Point]) -> Callable[[int], None]:
    def local_step(worker: int) -> None:
        models[worker].value.data.add_(worker + 1.0)

    return local_step


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_learners_know_what_the_syncer_has_not_merged(mix: float) -> None:
    models = points(3)
    settings = DecoupledSettings(DecoupledDiLoCo(mix=mix), MergeSettings(3, 6))
    speeds = [1.0, 0.7, 0.4]
    simulation = Simulation.from_settings(models, settings, speeds=speeds, links="wan")
    simulation.run(adding(models), seconds=500.0)
    for worker, theirs in enumerate(simulation.goodput):
        own = parts_of(simulation, worker)
        assert sum(own.values()) == pytest.approx(1.0)
        assert own["lost"] > 0.02
        assert own["goodput"] == pytest.approx(theirs.merged + theirs.pending, abs=0.03)
        assert own["waiting"] == theirs.waiting == 0.0


def test_a_learner_whose_pushes_are_refused_knows_that_they_are_lost() -> None:
    models = points(3)
    settings = DecoupledSettings(DecoupledDiLoCo(), MergeSettings(3, 6, keep_late=False))
    simulation = Simulation.from_settings(models, settings, speeds=[1.0, 1.0, 1 / 12])
    simulation.run(adding(models), seconds=600.0)
    for worker, theirs in enumerate(simulation.goodput):
        own = parts_of(simulation, worker)
        assert own["goodput"] == pytest.approx(theirs.merged + theirs.pending, abs=0.04)
    assert parts_of(simulation, 2)["lost"] > 0.6


def test_a_fast_worker_waits_for_a_straggler() -> None:
    models = points(3)
    simulation = Simulation(models, LocalSGD(), sync_every=10, speeds=[1.0, 1.0, 0.4])
    simulation.run(adding(models), num_rounds=12)
    for worker, share in enumerate((0.4, 0.4, 1.0)):
        own, costs = parts_of(simulation, worker), simulation.costs[worker]
        assert own["goodput"] == pytest.approx(share) == costs.utilisation
        assert own["waiting"] == pytest.approx(costs.wait_s / costs.time_s)
        statistics = simulation.participants[worker].statistics
        assert statistics.participation == 1.0
        straggler = statistics.straggler
        assert straggler is not None
        assert straggler == (2, pytest.approx(2.5), 12)


def test_steps_that_end_in_nan_are_lost_and_have_no_weight() -> None:
    models = points(4)
    simulation = Simulation(models, DiLoCo(), sync_every=5, speeds=[1.0] * 4)
    add = adding(models)

    def local_step(worker: int) -> None:
        add(worker)
        if worker == 2 and 11 <= simulation.steps[2] < 13:
            models[2].value.data.fill_(torch.nan)

    simulation.run(local_step, num_rounds=3)
    assert {one.statistics.participation for one in simulation.participants} == {0.75}
    simulation.run(local_step, num_rounds=1)
    lost = [one.statistics.lost_steps for one in simulation.participants]
    assert lost == [0, 0, 5, 0]
    assert parts_of(simulation, 2)["lost"] == pytest.approx(5 / 20)
    assert simulation.participants[0].statistics.participation == 1.0


STEP_S = [0.04, 0.1]


def step_or_nan(worker: int, step: int, value: torch.Tensor) -> None:
    """Add to a vector; the eighth local step of worker 0 makes NaN of it."""
    value.data.add_(torch.nan if (worker, step) == (0, 8) else worker + 1.0)


def real_parts(rank: int, world: int) -> dict[str, float]:
    """Return the parts of the time of a process whose local steps sleep."""
    model = points(1)[0]
    engine = StepEngine(model, DiLoCo(), sync_every=5)
    engine.start()
    for step in range(1, 31):
        time.sleep(STEP_S[rank])
        step_or_nan(rank, step, model.value)
        engine.step()
    goodput = engine.statistics.goodput
    engine.finish()
    engine.close()
    assert goodput is not None
    return goodput.parts


def test_real_processes_that_sleep_have_the_goodput_of_the_simulation(pool: Pool) -> None:
    models = points(2)
    simulation = Simulation(models, DiLoCo(), sync_every=5, speeds=[1 / s for s in STEP_S])

    def local_step(worker: int) -> None:
        step_or_nan(worker, simulation.steps[worker] + 1, models[worker].value)

    simulation.run(local_step, num_rounds=6)
    for worker, found in enumerate(pool.run(real_parts, world=2)):
        assert found == pytest.approx(parts_of(simulation, worker), abs=0.1)
    first, second = (parts_of(simulation, worker) for worker in range(2))
    assert first == pytest.approx(
        {"goodput": 1 / 3, "waiting": 0.6, "joining": 0, "lost": 1 / 15, "restarting": 0}
    )
    assert second["goodput"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        # A round late: the next message has the local steps, unless the policy keeps progress.
        ((EverySteps(10, overlap=True), Restart()), 0.0),
        ((EverySteps(10, overlap=True), KeepProgress()), 0.0),
        ((EverySteps(10, overlap=True), Mix(0.25)), 0.75),
        ((Staggered(10, 1, 3), Mix(0.5)), 0.15),
        ((Staggered(10, 2, 3), Mix(0.0)), 0.3),
        ((Staggered(10, 2, 3), KeepProgress()), 0.0),
    ],
)
def test_late_results_overwrite_local_steps(settings: tuple[Any, Any], lost: float) -> None:
    models, (schedule, policy) = [Layers((6, 6)) for _ in range(2)], settings
    chosen = RoundSettings(DiLoCo(0.7, 0.0), schedule, merge_policy=policy)
    simulation = Simulation.from_settings(models, chosen)

    def local_step(worker: int) -> None:
        for parameter in models[worker].parameters():
            parameter.data.add_(worker + 1.0)

    simulation.run(local_step, num_rounds=60)
    for one in simulation.participants:
        assert one.statistics.lost_steps / one.statistics.steps == pytest.approx(lost, abs=0.03)
