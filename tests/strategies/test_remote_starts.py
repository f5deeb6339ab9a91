"""A remote optimizer between the set-up and the first step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.parameter_server import Tiers
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import all_ranks, fit_with, remote_or_ddp, remote_trainer

STEPS = 4
TIMEOUT_S = 2.0


class FrozenComplex(TinyModule):
    """Its complex parameter is frozen, so it is not sent."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)


def fit(rank: int, world: int, kind: type[TinyModule]) -> None:
    fit_with(remote_or_ddp(2), kind(), make_loader(rank, STEPS))


def test_frozen_complex_parameters_are_allowed(pool: Pool) -> None:
    pool.run(fit, FrozenComplex, world=3)


class SlowHook(TinyModule):
    """Exceeds the timeout in a hook before training, on workers or service ranks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def prepare_data(self) -> None:
        self.delay("prepare_data")

    def setup(self, stage: str) -> None:
        self.delay("setup")

    def delay(self, hook: str) -> None:
        serves = self.trainer.strategy.serves  # type: ignore[attr-defined]
        if self.hook == (f"{hook} where it serves" if serves else hook):
            time.sleep(1.5 * TIMEOUT_S)


def fit_late(rank: int, world: int, hook: str, between_s: float) -> int:
    with all_ranks(num_nodes=world // 2) as environment:  # the second node serves, if there is one
        for _ in range(2 if between_s else 1):
            strategy = RemoteOptimizerStrategy(2, timeout_s=TIMEOUT_S)
            nodes = {"num_nodes": environment.num_nodes, "devices": world // environment.num_nodes}
            settings: Any = {"max_epochs": 1, "use_distributed_sampler": False, **nodes}
            trainer = remote_trainer(environment, strategy, **settings)
            trainer.fit(SlowHook(hook), make_loader(rank, STEPS))
            if rank < 2:
                time.sleep(between_s)
        return trainer.global_step


@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize(
    ("hook", "between_s", "world"),
    [
        ("prepare_data", 0.0, 3),
        ("prepare_data where it serves", 0.0, 4),
        ("setup", 0.0, 3),
        ("between two fits", 1.5 * TIMEOUT_S, 3),
    ],
)
def test_training_may_start_later_than_the_timeout(
    pool: Pool, hook: str, between_s: float, world: int
) -> None:
    assert pool.run(fit_late, hook, between_s, world=world)[:2] == [STEPS, STEPS]


class FailsBefore(TinyModule):
    """Raises an error in a hook before training, on one rank."""

    def __init__(self, hook: str, victim: int) -> None:
        super().__init__()
        self.hook = hook
        self.victim = victim

    def fail_in(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_rank == self.victim:
            raise LookupError("no such file")

    def prepare_data(self) -> None:
        self.fail_in("prepare_data")

    def setup(self, stage: str) -> None:
        self.fail_in("setup")

    def configure_optimizers(self) -> Any:
        self.fail_in("configure_optimizers")
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        self.fail_in("train_dataloader")
        return make_loader(self.trainer.global_rank, STEPS)


def fail_before(rank: int, world: int, hook: str, victim: int) -> None:
    fit_with(remote_or_ddp(2), FailsBefore(hook, victim))


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("hook", "victim"),
    [
        ("prepare_data", 0),
        ("setup", 1),
        ("setup", 2),
        ("configure_optimizers", 0),
        ("train_dataloader", 1),
    ],
)
def test_an_error_before_training_is_named_on_all_ranks(pool: Pool, hook: str, victim: int) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(fail_before, hook, victim, world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    name = Tiers.detect(3, 2).name(victim)
    for rank, failure in caught.value.failures.items():
        assert "no such file" in failure.message
        assert rank == victim or name in failure.message.lower()
