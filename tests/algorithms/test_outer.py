"""Torch optimizers as outer optimizers: equal to that optimizer on mean gradients."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, Simulation, StepEngine
from tests.harness.pool import Pool, run_each
from tests.harness.toys import (
    SGD,
    Point,
    apply_update,
    assert_close,
    randn,
    run_engine,
    simulate,
    train_ddp,
)

UNIT_STEP = partial(SGD, lr=1.0)
"""With this optimizer, the pseudo-gradient of one local step is the gradient."""

ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adagrad_start": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "adamax": partial(torch.optim.Adamax, lr=0.02),
    "nadam": partial(torch.optim.NAdam, lr=0.02),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "heavy_ball": partial(torch.optim.SGD, lr=0.05, momentum=0.8, dampening=0.2),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    "maximize": partial(torch.optim.Adam, lr=0.01, maximize=True),
    "foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
}


def test_a_round_after_every_step_is_data_parallel_training_with_that_optimizer(
    subtests: pytest.Subtests,
) -> None:
    for name, make_optimizer in ELEMENTWISE.items():
        with subtests.test(name):
            algorithm = DiLoCo(outer_optimizer=make_optimizer)
            history = simulate(algorithm, 3, 12, inner=UNIT_STEP)
            assert_close(history[:12], train_ddp(3, 12, make_optimizer)[:, None].expand(-1, 3, -1))


def test_a_round_after_every_step_is_that_optimizer_on_gloo(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    calls = {
        name: (DiLoCo(outer_optimizer=ELEMENTWISE[name]), 6, {"sync_every": 1}, UNIT_STEP)
        for name in ("adamw", "adagrad", "nesterov", "rmsprop")
    }
    for name, results in run_each(pool, run_engine, calls, world=3).items():
        with subtests.test(name):
            expected = train_ddp(3, 6, ELEMENTWISE[name])
            for history in results:
                assert_close(history[:6], expected)
                assert torch.equal(history, results[0])


def test_with_overlap_it_steps_with_the_gradient_of_the_previous_round() -> None:
    """Equal workers: a plain loop of torch's Adagrad on delayed gradients."""
    models = [Point(torch.full((2,), 3.0, dtype=torch.float64)) for _ in range(2)]
    make_optimizer = ELEMENTWISE["adagrad"]
    algorithm = DiLoCo(outer_optimizer=make_optimizer)
    simulation = Simulation(models, algorithm, overlap=True, warm_start=False)
    simulation.run(lambda worker: models[worker].value.data.mul_(0.6), 6)

    outer = torch.nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    optimizer = make_optimizer([outer])
    gradients = [0.4 * outer.detach()]
    for _ in range(5):
        fresh = 0.4 * outer.detach()
        outer.grad = gradients.pop()
        gradients.append(fresh)
        optimizer.step()
    # A phase's pseudo-gradient is relative to the outer parameters at its start.
    assert_close(simulation.consensus(), outer.detach())


def test_its_state_is_tensors_and_numbers_with_a_prefix() -> None:
    algorithm = DiLoCo(outer_optimizer=torch.optim.AdamW)
    state = algorithm.init(torch.zeros(3))
    assert set(state) == {"outer"}
    apply_update(algorithm, torch.zeros(3), torch.ones(3), state)
    assert set(state) == {"outer", "optimizer.step", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    assert state["optimizer.exp_avg"].shape == (3,)


def test_a_run_that_saves_and_loads_its_state_equals_an_unbroken_one(
    subtests: pytest.Subtests,
) -> None:
    gradients = randn(8, 4)

    def apply(algorithm: DiLoCo, state: dict[str, Any], rounds: range) -> Tensor:
        params = torch.empty(4, dtype=torch.float64)
        for t in rounds:
            apply_update(algorithm, params, gradients[t].clone(), state)
        return params

    for name, make_optimizer in ELEMENTWISE.items():
        with subtests.test(name):
            algorithm = DiLoCo(outer_optimizer=make_optimizer)
            expected = apply(algorithm, algorithm.init(randn(4, seed=1)), range(8))
            state = algorithm.init(randn(4, seed=1))
            apply(algorithm, state, range(4))
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert torch.equal(apply(algorithm, loaded, range(4, 8)), expected)


class Averaged(torch.optim.SGD):
    """An optimizer that counts its steps in the parameter group, as schedule-free ones do."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            p.data.sub_(p.grad, alpha=1 / group["count"])


class Remembering(torch.optim.SGD):
    """An optimizer whose state contains more than tensors and numbers."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["past"] = [*self.state[p].get("past", []), p.grad.clone()]


def test_an_unsupported_optimizer_is_refused_before_training(
    subtests: pytest.Subtests,
) -> None:
    """The error names the setting, not internals of the optimizer."""
    optimizers: dict[str, Any] = {
        "muon": torch.optim.Muon,
        "lbfgs": torch.optim.LBFGS,
        "sparse_adam": torch.optim.SparseAdam,
        "remembering": Remembering,
        "nothing": lambda params: None,
    }
    for name, make_optimizer in optimizers.items():
        with (
            subtests.test(name),
            pytest.raises((ValueError, TypeError), match="outer.optimizer"),
        ):
            DiLoCo(outer_optimizer=make_optimizer).prepare(2, None)


def test_an_optimizer_that_keeps_numbers_in_its_groups_is_refused() -> None:
    """The optimizer is created for every round, so values outside its state would get lost."""
    with pytest.raises((ValueError, TypeError), match="Averaged cannot be an outer optimizer"):
        DiLoCo(outer_optimizer=Averaged).prepare(2, None)


def refused_on_all_ranks(rank: int, world: int) -> str:
    try:
        StepEngine(Point(torch.zeros(2)), DiLoCo(outer_optimizer=torch.optim.SparseAdam))
    except (ValueError, TypeError) as error:
        return str(error)
    return "accepted"


def test_an_unsupported_optimizer_is_refused_on_every_worker(pool: Pool) -> None:
    for message in pool.run(refused_on_all_ranks, world=2):
        assert "SparseAdam" in message


@pytest.mark.parametrize("value", ["adamw", torch.optim.SGD([torch.zeros(1)], lr=0.1)], ids=type)
def test_a_value_that_is_not_callable_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="outer_optimizer must be a callable from parameters to a"):
        DiLoCo(outer_optimizer=value)


def test_it_is_called_with_the_whole_vector() -> None:
    assert DiLoCo().granularity == 1
    assert DiLoCo(outer_optimizer=torch.optim.AdamW).granularity is None
