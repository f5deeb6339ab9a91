"""The engine counts steps and runs the rounds that are due; sync points cost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, StepEngine
from lightning_loco.algorithms import Algorithm, RoundInfo
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.engine import fragment_sync as rounds_module
from lightning_loco.model import flat as flat_module
from lightning_loco.model.flat import Chunk, Packing
from lightning_loco.schedules import EverySteps
from tests.harness.pool import Pool, PoolError, run_each
from tests.harness.rounds import (
    GossipSendingScalars,
    SendingScalars,
    approach,
    simulate,
    train,
    zeros,
)
from tests.harness.small_model import flat
from tests.harness.toys import Point, apply_update, assert_close, randn

# ------------------------------------------------------------------------------- scalars

ROUNDS = 4
WITH_SCALARS: dict[str, tuple[Algorithm, bool]] = {
    "blocking": (SendingScalars(), False),
    "overlapped": (SendingScalars(), True),
    "neighbours": (GossipSendingScalars(), False),
    "overlapped neighbours": (GossipSendingScalars(), True),
}


def test_own_scalars_of_all_workers_are_received(pool: Pool, subtests: pytest.Subtests) -> None:
    """In every kind of round, in the simulation, and after a resume with a pending round."""
    settings_of = {
        name: RoundSettings(one, EverySteps(2, late)) for name, (one, late) in WITH_SCALARS.items()
    }
    rows = {
        (name, after): (settings, ROUNDS, zeros, after, True)
        for name, settings in settings_of.items()
        for after in (None, 2)
    }
    results = run_each(pool, train, rows, world=3)
    for name, settings in settings_of.items():
        with subtests.test(name):
            expected = simulate(settings, 3, ROUNDS, own=True)
            unbroken, resumed = (torch.stack(results[name, after], dim=1) for after in (None, 2))
            assert_close(unbroken, expected)
            assert torch.equal(resumed, unbroken)
            silent = simulate(settings, 3, ROUNDS)
            assert (silent - expected).abs().max() > 0.01


def receive_scalars(
    rank: int, world: int, algorithm: Algorithm, overlap: bool
) -> tuple[float, int]:
    model = zeros()
    engine = StepEngine(model, algorithm, sync_every=1, overlap=overlap)
    state = engine.fragments[0].memory.state
    state["own"].fill_(rank + 1.0)
    for _ in range(3):
        approach(rank, model)
        engine.step()
    engine.drain()
    engine.finish()
    engine.close()
    return state["received"], state["rounds"]


def test_scalars_are_in_the_order_of_the_workers_and_received_once_a_round(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, results in run_each(pool, receive_scalars, WITH_SCALARS, world=3).items():
        with subtests.test(name):
            _, overlap = WITH_SCALARS[name]
            applied = 1 if overlap else 2  # rounds applied before the last message
            assert results == [(1 + 4 + 9 + 3 * applied, 3)] * 3


# ---------------------------------------------------------------------------- light sync points


class Passes:
    """Counts operations that read or write the whole model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for owner, names in ((Chunk, ("pack", "unpack")), (Packing, ("pack", "unpack"))):
            for name in names:
                monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        counted = self._counted(flat_module.are_finite)
        monkeypatch.setattr(rounds_module, "are_finite", counted)

    def _counted(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.count += 1
            return function(*args)

        return call


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


SYNC_POINTS: dict[str, tuple[Algorithm, bool]] = {
    "blocking": (DiLoCo(), False),
    "blocking, whole": (DiLoCo(outer_optimizer=adamw), False),
    "overlapped": (DiLoCo(0.7, 0.0), True),
    "neighbours": (GASLoC(), False),
    "overlapped neighbours": (GASLoC(), True),
}


def sync_point(
    rank: int, world: int, algorithm: Algorithm, overlap: bool, steps: int, broken: bool
) -> dict[str, Any]:
    """Worker 1 takes more steps than worker 0 before a sync point, with rounds of two steps."""
    model = Point(torch.zeros(50, dtype=torch.float64))
    engine = StepEngine(model, algorithm, sync_every=2, overlap=overlap)
    for _ in range(2 + steps * rank):
        approach(rank, model)
        engine.step()
    if broken and rank == 0:
        model.value.data[3] = math.nan
    with pytest.MonkeyPatch.context() as monkeypatch:
        passes = Passes(monkeypatch)
        statuses = engine.sync_point("a barrier")
        at_sync_point = passes.count
    rounds, finite = engine.statistics.rounds, engine.worker.was_finite
    engine.finish()
    result = flat(model)
    engine.close()
    return {
        "passes": at_sync_point,
        "steps": [status.steps for status in statuses],
        "rounds": rounds,
        "finite": finite,
        "model": result,
    }


def every_sync_point(pool: Pool, steps: int, broken: bool) -> Iterable[tuple[str, list[Any]]]:
    """Return the results of both workers for each kind of sync point."""
    rows = {name: (*kind, steps, broken) for name, kind in SYNC_POINTS.items()}
    return run_each(pool, sync_point, rows, world=2).items()


def test_a_sync_point_without_a_round_makes_no_pass_over_the_model(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for steps in (0, 1):
        for name, results in every_sync_point(pool, steps, broken=False):
            with subtests.test(name, steps=steps):
                for result in results:
                    assert result["passes"] == 0
                    assert result["rounds"] == 1
                    assert result["steps"] == [0, steps]


def test_workers_at_a_sync_point_take_part_in_the_rounds_of_others(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for name, (first, second) in every_sync_point(pool, 5, broken=False):
        with subtests.test(name):
            for result in (first, second):
                assert result["rounds"] == 3
                assert result["steps"] == [0, 1]
                assert torch.equal(result["model"], first["model"])
            assert first["passes"] > 0


@pytest.mark.filterwarnings("ignore:.*NaN")
def test_a_worker_with_nan_at_a_sync_point_has_no_weight(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """It checks its parameters only when another worker runs a round, and then reports them."""
    for name, (first, second) in every_sync_point(pool, 5, broken=True):
        with subtests.test(name):
            assert (first["finite"], second["finite"]) == (True, True)  # after two rounds
            assert torch.equal(first["model"], second["model"])
            assert torch.isfinite(first["model"]).all()
            algorithm, overlap = SYNC_POINTS[name]
            if algorithm.exchange == "mean" and not overlap:
                expected = expected_without_worker_0(algorithm)
                assert_close(first["model"], expected)


def nan_of_the_only_one(rank: int, world: int) -> tuple[bool, Tensor]:
    """Worker 0 gets NaN in the second round, while worker 1 waits at the sync point of the end."""
    model = Point(torch.zeros(50, dtype=torch.float64))
    engine = StepEngine(model, DiLoCo(0.7, 0.0), sync_every=2)
    for step in range(2 if rank else 4):
        approach(rank, model)
        if step == 3:
            model.value.data[3] = math.nan
        engine.step()
    engine.finish()
    outer = engine.outer()
    assert outer is not None
    is_outer = torch.equal(flat(model), outer)
    result = flat(model)
    engine.close()
    return is_outer, result


@pytest.mark.filterwarnings("ignore:.*NaN")
def test_nan_of_the_only_worker_that_makes_steps_does_not_end_the_run(pool: Pool) -> None:
    first, second = pool.run(nan_of_the_only_one, world=2)
    # Both continue from the outer parameters of the first round.
    assert (first[0], second[0]) == (True, True)
    assert torch.equal(first[1], second[1])
    assert torch.isfinite(first[1]).all()


def expected_without_worker_0(algorithm: Algorithm) -> Tensor:
    """Compute the parameters by hand: two workers in the first round, then worker 1 alone.

    Worker 0 ends with the result of the last round, worker 1 one local step later.
    """
    outer = torch.zeros(50, dtype=torch.float64)
    state = algorithm.init(outer.clone())
    models = [Point(outer) for _ in range(2)]
    for steps, movers in ((2, (0, 1)), (2, (1,)), (2, (1,))):
        messages = []
        for worker in movers:
            for _ in range(steps):
                approach(worker, models[worker])
            messages.append(algorithm.propose(flat(models[worker]), state, RoundInfo()))
        params = flat(models[1])
        apply_update(algorithm, params, torch.stack(messages).mean(0), state)
        for model in models:
            model.value.data.copy_(params)
    approach(1, models[1])
    return (flat(models[0]) + flat(models[1])) / 2


# ------------------------------------------------------------------------------------ steps


def test_rounds_are_due_by_the_schedule_and_not_while_paused() -> None:
    model = zeros()
    engine = StepEngine(model, LocalSGD(), sync_every=3)
    assert [engine.step() for _ in range(7)] == [False, False, True] * 2 + [False]
    engine.paused = True
    assert not any(engine.step() for _ in range(7))
    engine.paused = False
    assert engine.step()
    assert (engine.worker.steps, engine.statistics.rounds, engine.worker.round_index) == (15, 3, 3)
    engine.close()


def test_an_engine_of_settings_is_that_of_keywords() -> None:
    settings = RoundSettings(DiLoCo(), EverySteps(3), bucket_bytes=12345)
    first = Engine.from_settings(zeros(), settings)
    second = StepEngine(zeros(), DiLoCo(), sync_every=3, bucket_bytes=12345)
    assert first.settings == second.settings
    first.close()
    second.close()
    first.close()


def finish_early(rank: int, world: int) -> Tensor:
    model = Point(torch.zeros(4, dtype=torch.float64))
    engine = StepEngine(model, LocalSGD(), sync_every=100)
    for _ in range(1 + rank):
        model.value.data.add_(1.0)
        engine.step()
    engine.finish()
    engine.close()
    return flat(model)


def test_what_is_not_shared_yet_is_shared_at_the_end(pool: Pool) -> None:
    for values in pool.run(finish_early, world=3):
        assert values.tolist() == [2.0] * 4


def steal_a_parameter(rank: int, world: int) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    engine = StepEngine(model, LocalSGD(), sync_every=1)
    model.bias.requires_grad_(True)
    try:
        engine.step()
    finally:
        engine.close()


def test_a_parameter_that_became_trainable_is_refused(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Parameter 'bias' became trainable during fit"):
        pool.run(steal_a_parameter, world=2)


def measured(rank: int, world: int) -> tuple[float | None, ...]:
    model = Point(torch.zeros(1000, dtype=torch.float64))
    engine = StepEngine(model, DiLoCo(1.0, 0.0), sync_every=1)
    engine.consensus_every, engine.consensus_elements = 1, 10**6
    engine.measure_outer_gradient = True
    assert engine.measure_outer_gradient
    model.value.data.copy_(randn(1000, seed=rank))
    engine.step()
    statistics = engine.statistics
    found = statistics.consensus_distance, statistics.outer_grad_norm
    assert statistics.persistence is None  # there is nothing before it
    model.value.data.add_(randn(1000, seed=10 + rank))
    engine.step()
    engine.close()
    return *found, statistics.persistence


def test_metrics_are_measured_on_request(pool: Pool) -> None:
    values = torch.stack([randn(1000, seed=rank) for rank in range(3)])
    away = float((values - values.mean(0)).square().sum(1).mean().sqrt())
    later = torch.stack([randn(1000, seed=10 + rank) for rank in range(3)]).mean(0)
    cosine = torch.nn.functional.cosine_similarity(values.mean(0), later, dim=0)
    for distance, norm, persistence in pool.run(measured, world=3):
        assert distance == pytest.approx(away, rel=1e-9)
        assert norm == pytest.approx(float(values.mean(0).norm()), rel=1e-9)
        assert persistence == pytest.approx(float(cosine), rel=1e-9)
