"""Steps that bypass Lightning are counted; parameter changes without a step raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCoStrategy
from tests.cases import CASES
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, flat, loss_of, make_loader

STEPS = 9


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


def fit(rank: int, world: int, name: str, ways: list[str]) -> list[tuple[Tensor, int, int]]:
    results = []
    for way in ways:
        module = ManualSteps(way)
        strategy = CASES[name].strategy(4, timeout_s=20)
        seen: list[int] = []
        module.on_train_batch_end = lambda *_, s=strategy, n=seen: n.append(s.engine.worker.steps)
        # As with DDP, the Trainer does not count steps that bypass it.
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, make_loader(rank, STEPS))
        results.append((flat(module), strategy.statistics.rounds, seen[-1]))
    return results


WAYS = ["own", "unwrapped", "inner", "of the trainer", "wrapped"]


@pytest.mark.parametrize(
    "name", ["local_sgd", "sparta", "diloco", "async_diloco", "gasloc", "noloco"]
)
def test_steps_that_bypass_lightning_give_the_same_result(pool: Pool, name: str) -> None:
    for first, *others in pool.run(fit, name, ["through Lightning", *WAYS], world=2):
        assert first[1] >= 2
        assert first[2] == STEPS
        for way, other in zip(WAYS, others, strict=True):
            assert torch.equal(other[0], first[0]), way
            assert other[1:] == first[1:], way


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
    trainer = make_trainer(DiLoCoStrategy(sync_every=3, timeout_s=20), max_epochs=1)
    trainer.fit(ByHand(), make_loader(rank, 6))


def test_parameters_that_change_without_a_step_are_an_error(pool: Pool) -> None:
    with pytest.raises(PoolError, match="no step of a torch optimizer was seen") as error:
        pool.run(fit_by_hand, world=2)
    assert set(error.value.failures) == {0, 1}
