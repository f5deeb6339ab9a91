"""Eager DiLoCo: its rule as a plain loop, and the cases in which it is DiLoCo."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, EagerDiLoCo, EagerDiLoCoStrategy, Simulation
from lightning_loco.algorithms import KeepProgress, Linear, largest_stable_contraction
from lightning_loco.algorithms.outer_lr import OuterLR, rate_at
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import Complete
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import flat, make_model, worker_batch
from tests.harness.toys import (
    ADAMW,
    SGD,
    Point,
    assert_close,
    randn,
    run_engine,
    simulate,
    train_step,
)

RATE, MOMENTUM = 0.5, 0.4
ALGORITHM = EagerDiLoCo(RATE, MOMENTUM)


def put(model: torch.nn.Module, values: Tensor) -> None:
    parts = values.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.data.copy_(part.view_as(p))


def plain_loop(
    world: int,
    phases: int,
    steps: int,
    inner: Any,
    warm: bool,
    nesterov: bool = True,
    rate: OuterLR = RATE,
) -> Tensor:
    """Run each worker with a separate torch optimizer: ``(phases + 1, N, P)``.

    The last entry follows the last mean: momentum and parameters are as if the last
    gradient had been the mean.
    """
    outer_sgd = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM, nesterov=nesterov)
    models = [make_model() for _ in range(world)]
    optimizers = [inner(model.parameters()) for model in models]
    outers = [torch.nn.Parameter(flat(make_model())) for _ in range(world)]
    outer_optimizers = [outer_sgd([outer]) for outer in outers]
    before: Tensor | None = None
    history = []
    for phase in range(phases):
        for worker, model in enumerate(models):
            for step in range(phase * steps, (phase + 1) * steps):
                train_step(model, optimizers[worker], worker_batch(worker, step))
        pairs = zip(outers, models, strict=True)
        fresh = torch.stack([outer.detach() - flat(model) for outer, model in pairs])
        gradients = fresh / world
        if before is not None:
            gradients = gradients + before.mean(0) - before / world
        elif warm and phase == 0:
            gradients = fresh.mean(0).expand_as(fresh)
        for outer, gradient, optimizer in zip(outers, gradients, outer_optimizers, strict=True):
            outer.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = rate_at(rate, phase)
            optimizer.step()
        before = None if warm and phase == 0 else fresh
        for model, outer in zip(models, outers, strict=True):
            put(model, outer.detach())
        history.append(torch.stack([outer.detach().clone() for outer in outers]))
    end = history[-1]
    if before is not None:
        factor = 1 + MOMENTUM if nesterov else 1.0
        end = end - rate_at(rate, phases - 1) * factor * (before.mean(0) - before / world)
    return torch.stack([*history, end.mean(0).expand_as(end)])


@pytest.mark.parametrize(
    ("inner", "warm", "nesterov", "rate"),
    cover(
        [pytest.param(SGD, id="SGD"), pytest.param(ADAMW, id="AdamW")],
        [False, True],
        [True, False],
        [RATE, pytest.param(Linear(0.2, RATE, rounds=4), id="Linear")],
    ),
)
def test_it_is_the_rule_as_a_plain_loop(
    inner: Any, warm: bool, nesterov: bool, rate: OuterLR
) -> None:
    algorithm = EagerDiLoCo(rate, MOMENTUM, nesterov)
    settings = {"overlap": True, "warm_start": warm, "sync_every": 2}
    for rounds in (1, 6):
        history = simulate(algorithm, 3, rounds, inner=inner, **settings)
        assert_close(history, plain_loop(3, rounds, 2, inner, warm, nesterov, rate))
    late = simulate(DiLoCo(rate, MOMENTUM, nesterov), 3, 6, inner=inner, **settings)
    assert (history - late).abs().max() > 1e-3


@pytest.mark.parametrize(("world", "warm"), cover([2, 3, 4], [False, True], strength=1))
def test_it_is_the_rule_on_gloo(pool: Pool, world: int, warm: bool) -> None:
    expected = plain_loop(world, 5, 2, ADAMW, warm)
    settings = {"overlap": True, "warm_start": warm, "sync_every": 2, "bucket_bytes": 4096}
    results = pool.run(run_engine, ALGORITHM, 5, settings, ADAMW, world=world)
    assert_close(torch.stack(results, dim=1), expected)


def test_one_worker_makes_synchronous_diloco_bit_for_bit(subtests: pytest.Subtests) -> None:
    settings = {"inner": ADAMW, "sync_every": 3}
    for momentum, nesterov in ((0.0, True), (0.9, True), (0.9, False)):
        for warm in (False, True):
            with subtests.test(momentum=momentum, nesterov=nesterov, warm_start=warm):
                eager = EagerDiLoCo(0.7, momentum, nesterov)
                history = simulate(eager, 1, 6, overlap=True, warm_start=warm, **settings)
                diloco = DiLoCo(0.7, momentum, nesterov)
                assert torch.equal(history, simulate(diloco, 1, 6, **settings))


def test_blocking_rounds_are_diloco_bit_for_bit() -> None:
    settings = {"inner": ADAMW, "sync_every": 3}
    expected = simulate(DiLoCo(0.7, 0.9), 3, 6, **settings)
    assert torch.equal(simulate(EagerDiLoCo(0.7, 0.9), 3, 6, **settings)[:-1], expected[:-1])


def train_points(algorithm: EagerDiLoCo, rounds: int, drain: bool = True) -> tuple[Tensor, Tensor]:
    """Return the workers' final parameters, and the sum of the mean progress of all phases."""
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in range(3)]
    targets = randn(3, 4)
    progress = torch.zeros(4, dtype=torch.float64)

    def local_step(worker: int) -> None:
        moved = 0.3 * (targets[worker] - models[worker].value.data)
        progress.add_(moved / 3)
        models[worker].value.data.add_(moved)

    simulation = Simulation(models, algorithm, overlap=True)
    simulation.run(local_step, rounds)
    if drain:
        simulation.drain()
    return torch.stack(simulation.params()), progress


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_all_progress_is_applied_once_everywhere(rounds: int) -> None:
    """The corrections telescope; without momentum the workers are equal at the end."""
    params, progress = train_points(EagerDiLoCo(0.6, 0.0), rounds)
    assert_close(params, (0.6 * progress).expand(3, 4))


def test_the_distance_between_the_outer_parameters_is_bounded() -> None:
    def apart(rounds: int) -> float:
        params, _ = train_points(EagerDiLoCo(0.6, 0.3), rounds, drain=False)
        return float((params - params.mean(0)).norm())

    assert apart(20) > 1e-3
    assert apart(400) < 1.1 * apart(200) < 2 * apart(20)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_the_largest_stable_contraction_is_where_it_begins_to_diverge(share: float) -> None:
    """Workers take equal local steps, as many as 1/share."""
    limit = largest_stable_contraction(1.5, 0.5, share=share)
    world, rounds = round(1 / share), 100 if share == 1 else 300

    def error(contraction: float) -> float:
        models = [Point(torch.ones(1, dtype=torch.float64)) for _ in range(world)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simulation = Simulation(models, EagerDiLoCo(1.5, 0.5), overlap=True)
        simulation.run(lambda worker: models[worker].value.data.mul_(1 - contraction), rounds)
        return float(simulation.consensus().abs())

    assert limit < 2
    assert error(0.95 * limit) < 1e-3
    assert error(1.05 * limit) > 10


def test_its_strategy_overlaps_and_passes_its_arguments() -> None:
    strategy = EagerDiLoCoStrategy(20, 0.4, 0.3, False, warm_start=False)
    assert strategy.settings.algorithm == EagerDiLoCo(0.4, 0.3, False)
    assert strategy.settings.schedule.overlap
    assert not strategy.settings.schedule.warm_start
    assert strategy.settings.prepare(4).algorithm.share == 0.25


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outer_lr must be positive, got -1.0"):
        EagerDiLoCo(-1.0)
    with pytest.raises(ValueError, match=r"outer_momentum must be in \[0, 1\), got 1.0"):
        EagerDiLoCo(outer_momentum=1.0)
    with pytest.raises(ValueError, match="EagerDiLoCo averages over all workers and takes no"):
        EagerDiLoCo().prepare(4, Complete())


def test_a_merge_policy_that_would_skip_the_own_share_is_refused() -> None:
    late = RoundSettings(EagerDiLoCo(), EverySteps(2, overlap=True), merge_policy=KeepProgress())
    with pytest.raises(ValueError, match=r"no merge policy but Restart\(\), got KeepProgress"):
        late.prepare(2)
    blocking = RoundSettings(EagerDiLoCo(), EverySteps(2), merge_policy=KeepProgress())
    assert blocking.prepare(2).algorithm.share == 0.5


def test_unstable_settings_are_warned_about_by_number_of_workers() -> None:
    with pytest.warns(UserWarning, match="eager updates of 8 workers is unstable with overlap"):
        EagerDiLoCo(0.7, 0.9).prepare(8, None, is_late=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EagerDiLoCo(0.7, 0.9).prepare(1, None, is_late=True)
