"""Local steps: they read no values, and count however they are taken."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_loco.strategies import METHODS
from tests.cases import CASES, Case, without_variants
from tests.harness.pool import Pool, PoolError, run_each
from tests.harness.small_model import TinyModule, flat, loss_of, make_loader
from tests.strategies.families import fit_with, strategy_of

SYNC_EVERY = 4
STEPS = 14


class Reads(TorchDispatchMode):
    """Records where this package reads a value, which would synchronize with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            stack = "".join(traceback.format_stack())
            if "/lightning_loco/" in stack:
                self.found.append(stack)
        return func(*args, **(kwargs or {}))


class NoReads(TinyModule):
    """A module that reads no value itself."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)


class Watched(Callback):
    """Records reads in steps without a round; rounds by the clock would wait in them."""

    def __init__(self, case: Case) -> None:
        self.by_clock = case.by_clock
        self.every = SYNC_EVERY // (case.fragments or 1)
        self.reads = Reads()
        self.graphs: list[Any] = []

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.strategy.engine.paused = self.by_clock

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.is_watching = trainer.global_step == 0 or bool(trainer.global_step % self.every)
        if self.is_watching:
            self.reads.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.is_watching:
            self.reads.__exit__(None, None, None)
        self.graphs.append(trainer.strategy._steps.loss.grad_fn)


def fit_watched(
    rank: int, world: int, case: Case, module: type[TinyModule] = NoReads
) -> tuple[list[str], int]:
    watched = Watched(case)
    # A step that applies a result is not only a local step.
    strategy = dataclasses.replace(case, delay=0).strategy(SYNC_EVERY)
    trainer = fit_with(strategy, module(), make_loader(rank, STEPS), callbacks=[watched])
    assert watched.graphs == [None] * STEPS, case
    return watched.reads.found, trainer.global_step


@pytest.mark.parametrize("are_methods", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_local_step_reads_no_value(
    pool: Pool, are_methods: bool, subtests: pytest.Subtests
) -> None:
    names = [name for name in without_variants() if (name in METHODS) is are_methods]
    found = run_each(pool, fit_watched, {name: [CASES[name]] for name in names}, world=2)
    for name in names:
        with subtests.test(name):
            for reads, steps in found[name]:
                assert steps == STEPS
                assert not reads, reads[0]


def test_a_read_is_detected(pool: Pool) -> None:
    for found, _ in pool.run(fit_watched, CASES["diloco"], TinyModule, world=2):
        assert "losses.append(loss.item())" in found[0]


# ------------------------------------------------------ steps that bypass Lightning


class ManualSteps(TinyModule):
    """Takes steps in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(lr=0.05)
        self.automatic_optimization = False
        self.way = way

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.own = WrappingOptimizer(super().configure_optimizers())
        return self.own.inner if self.way != "wrapped" else self.own

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = {
            "through Lightning": lambda: self.optimizers(),
            "own": lambda: self.own.inner,
            "unwrapped": lambda: self.optimizers(use_pl_optimizer=False),
            "inner": lambda: self.optimizers().optimizer,
            "of the trainer": lambda: self.trainer.optimizers[0],
            "wrapped": lambda: self.own,
        }[self.way]()
        loss = loss_of(self.model, batch)
        self.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class WrappingOptimizer(torch.optim.Optimizer):
    """Calls another optimizer in its step, like Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def fit_manually(rank: int, world: int, name: str, way: str) -> tuple[Tensor, int, int]:
    module, strategy, seen = ManualSteps(way), strategy_of(name, SYNC_EVERY), []
    module.on_train_batch_end = lambda *_: seen.append(strategy.engine.worker.steps)  # type: ignore[method-assign]
    # As with DDP, the Trainer does not count steps that bypass it.
    fit_with(strategy, module, make_loader(rank, STEPS))
    return flat(module), strategy.statistics.rounds, seen[-1]


WAYS = ["own", "unwrapped", "inner", "of the trainer", "wrapped"]


@pytest.mark.parametrize(
    "name", ["local_sgd", "sparta", "diloco", "async_diloco", "gasloc", "noloco"]
)
def test_steps_that_bypass_lightning_give_the_same_result(pool: Pool, name: str) -> None:
    rows = {way: [name, way] for way in ["through Lightning", *WAYS]}
    found = run_each(pool, fit_manually, rows, world=2)
    for way in WAYS:
        for (*expected, steps), (*own, own_steps) in zip(
            found["through Lightning"], found[way], strict=True
        ):
            assert expected[1] >= 2
            assert own_steps == steps == STEPS
            assert torch.equal(own[0], expected[0]), way
            assert own[1] == expected[1], way


class ByHand(TinyModule):
    """Changes its parameters without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(loss_of(self.model, batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data.sub_(gradient, alpha=0.05)


def fit_by_hand(rank: int, world: int) -> None:
    fit_with(strategy_of("diloco", timeout_s=20), ByHand(), make_loader(rank, 6))


def test_parameters_that_change_without_a_step_are_an_error(pool: Pool) -> None:
    with pytest.raises(PoolError, match="no step of a torch optimizer was seen") as error:
        pool.run(fit_by_hand, world=2)
    assert set(error.value.failures) == {0, 1}
