"""DiLoCo against the published loop, Local SGD, Lookahead and closed forms."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, LocalSGD, Simulation
from lightning_loco.topology import Complete
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import flat, make_model, worker_batch
from tests.harness.toys import (
    ADAMW,
    SGD,
    Point,
    assert_close,
    flat_rounds,
    move_to,
    randn,
    run_engine,
    simulate,
    states_of,
    train_step,
)

BUILT_IN = {
    "nesterov": DiLoCo(0.7, 0.9),
    "heavy_ball": DiLoCo(0.4, 0.8, nesterov=False),
    "plain": DiLoCo(0.7, 0.0),
}
TORCH = {
    "nesterov": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "heavy_ball": partial(torch.optim.SGD, lr=0.4, momentum=0.8),
    "plain": partial(torch.optim.SGD, lr=0.7),
}


def published_loop(world: int, rounds: int, steps: int, make_outer: Any, inner: Any) -> Tensor:
    """Run the published loop: a torch optimizer whose gradients are mean(outer - local)."""
    outer_model = make_model()
    outer = make_outer(outer_model.parameters())
    models = [copy.deepcopy(outer_model) for _ in range(world)]
    optimizers = [inner(model.parameters()) for model in models]
    history = []
    for r in range(rounds):
        for worker, model in enumerate(models):
            for step in range(steps):
                train_step(model, optimizers[worker], worker_batch(worker, r * steps + step))
        locals_of = zip(*(model.parameters() for model in models), strict=True)
        with torch.no_grad():
            for p, local in zip(outer_model.parameters(), locals_of, strict=True):
                p.grad = torch.stack([p - q for q in local]).mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(outer_model.state_dict())
        history.append(flat(outer_model))
    return torch.stack(history)


@pytest.mark.parametrize(
    ("kind", "inner"),
    cover(BUILT_IN, [pytest.param(SGD, id="SGD"), pytest.param(ADAMW, id="AdamW")], strength=1),
)
def test_it_is_the_published_loop_with_torch_sgd(kind: str, inner: Any) -> None:
    expected = published_loop(3, 6, 3, TORCH[kind], inner)
    for algorithm in (BUILT_IN[kind], DiLoCo(outer_optimizer=TORCH[kind])):
        history = simulate(algorithm, 3, 6, inner=inner, sync_every=3)
        assert_close(history[:6], expected[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("kind", BUILT_IN)
def test_it_is_the_published_loop_on_gloo(pool: Pool, kind: str) -> None:
    expected = published_loop(3, 4, 2, TORCH[kind], ADAMW)
    for history in pool.run(run_engine, BUILT_IN[kind], 4, {"sync_every": 2}, ADAMW, world=3):
        assert_close(history[:4], expected)


def test_outer_sgd_with_rate_1_is_local_sgd(subtests: pytest.Subtests) -> None:
    settings = {"inner": ADAMW, "sync_every": 3}
    for world in range(1, 5):
        with subtests.test(world=world):
            expected = simulate(LocalSGD(), world, 5, **settings)
            assert_close(simulate(DiLoCo(1.0, 0.0), world, 5, **settings), expected)


def test_outer_sgd_with_rate_1_is_local_sgd_on_gloo(pool: Pool) -> None:
    expected = simulate(LocalSGD(), 3, 5, sync_every=3)[:, 0]
    for history in pool.run(run_engine, DiLoCo(1.0, 0.0), 5, {"sync_every": 3}, world=3):
        assert_close(history, expected)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_a_single_worker_without_momentum_is_lookahead(rate: float) -> None:
    """slow += rate * (fast - slow) every 4 steps; with rate 1 that is plain training."""
    model = make_model()
    optimizer = ADAMW(model.parameters())
    slow = flat(model)
    history = []
    for step in range(12):
        train_step(model, optimizer, worker_batch(0, step))
        if step % 4 == 3 and rate != 1:
            slow += rate * (flat(model) - slow)
            position = 0
            for p in model.parameters():
                p.data.copy_(slow[position : position + p.numel()].view_as(p))
                position += p.numel()
        if step % 4 == 3:
            history.append(flat(model))
    result = simulate(DiLoCo(rate, 0.0), 1, 3, inner=ADAMW, sync_every=4)
    assert_close(result[:3, 0], torch.stack(history))


@pytest.mark.parametrize("algorithm", BUILT_IN.values(), ids=BUILT_IN)
def test_all_workers_are_bit_identical_after_every_round(algorithm: DiLoCo) -> None:
    history = simulate(algorithm, 4, 6, inner=ADAMW, sync_every=2)
    assert torch.equal(history, history[:, :1].expand_as(history))
    assert (history[1:6] != history[:5]).any(-1).all()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_workers_are_bit_identical_after_every_round_on_gloo(pool: Pool, world: int) -> None:
    first, *others = pool.run(run_engine, DiLoCo(), 6, {"sync_every": 2}, ADAMW, world=world)
    for other in others:
        assert torch.equal(other, first)


def test_one_step_of_outer_sgd_with_rate_1_gives_the_mean_of_the_local_parameters() -> None:
    """Pins the sign: the opposite one would move away from the mean."""
    targets = randn(3, 4)
    starts = randn(4, seed=1).expand(3, 4)
    after = flat_rounds(DiLoCo(1.0, 0.0), starts, move_to(targets, 1.0), 1)[1]
    assert_close(after, targets.mean(0).expand(3, 4))


def test_the_first_outer_step_with_momentum_is_1_plus_momentum_times_as_long() -> None:
    targets = randn(3, 4)
    starts = torch.zeros_like(targets)
    plain = flat_rounds(DiLoCo(0.7, 0.0), starts, move_to(targets, 0.5), 1)[1]
    nesterov = flat_rounds(DiLoCo(0.7, 0.9), starts, move_to(targets, 0.5), 1)[1]
    heavy_ball = flat_rounds(DiLoCo(0.7, 0.9, nesterov=False), starts, move_to(targets, 0.5), 1)[1]
    assert_close(nesterov, 1.9 * plain)
    assert_close(heavy_ball, plain)


@pytest.mark.parametrize(("rate", "contraction"), [(0.7, 0.3), (1.0, 0.5), (1.9, 0.9)])
def test_on_quadratics_the_error_shrinks_by_1_minus_rate_times_contraction(
    rate: float, contraction: float
) -> None:
    targets = randn(4, 3)
    starts = randn(3, seed=1).expand(4, 3)
    history = flat_rounds(DiLoCo(rate, 0.0), starts, move_to(targets, contraction), 10)
    error = history - targets.mean(0)
    factors = (1 - rate * contraction) ** torch.arange(11, dtype=torch.float64)
    assert_close(error, factors[:, None, None] * error[0])


@pytest.mark.parametrize("steps", [1, 5])
def test_gradient_descent_contracts_by_a_power(steps: int) -> None:
    """Local steps with rate b on a (x - c)^2 / 2 leave (1 - a b)^H of the error."""
    a, b, eta = 2.0, 0.1, 0.7
    targets = randn(3, 2)
    models = [Point(torch.zeros(2, dtype=torch.float64)) for _ in targets]

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        value.sub_(b * a * (value - targets[worker]))

    simulation = Simulation(models, DiLoCo(eta, 0.0), sync_every=steps)
    simulation.run(local_step, 6)
    k = 1 - (1 - a * b) ** steps
    assert_close(simulation.consensus() - targets.mean(0), -((1 - eta * k) ** 6) * targets.mean(0))


def test_the_state_is_equal_on_all_workers() -> None:
    models = [Point(torch.zeros(3)) for _ in range(3)]
    simulation = Simulation(models, DiLoCo())
    simulation.run(lambda worker: models[worker].value.data.add_(worker + 0.1), 3)
    for state in states_of(simulation):
        assert DiLoCo.replicated
        assert torch.equal(state["outer"], simulation.consensus())
        assert torch.equal(state["momentum"], states_of(simulation)[0]["momentum"])


def test_numbers_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    invalid = [
        ({"outer_lr": 0.0}, r"outer_lr must be positive, got 0\.0\. A common value is 0.7"),
        ({"outer_lr": float("nan")}, "outer_lr must be positive, got nan"),
        ({"outer_lr": float("inf")}, "outer_lr must be positive, got inf"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_momentum": -0.1}, r"outer_momentum must be in \[0, 1\), got -0.1"),
        ({"outer_momentum": float("nan")}, r"outer_momentum must be in \[0, 1\), got nan"),
    ]
    for settings, message in invalid:
        with subtests.test(str(settings)), pytest.raises(ValueError, match=message):
            DiLoCo(**settings)


def test_a_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="DiLoCo averages over all workers and takes no topology"):
        DiLoCo().prepare(4, Complete())
