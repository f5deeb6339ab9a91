"""A remote optimizer between the set-up and the first step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.parameter_server import Tiers
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import all_ranks, fit_with, remote_or_ddp, remote_trainer

STEPS = 4
TIMEOUT_S = 2.0
HOOKS = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
)


class Loads(Callback):
    """Loads other weights in one hook, once."""

    def __init__(self, hook: str) -> None:
        self.done = False
        setattr(self, hook, self.load)

    def load(self, trainer: Any, module: Any, *_: Any) -> None:
        if not self.done:
            module.model.load_state_dict(
                {name: torch.full_like(v, 5.0) for name, v in module.model.state_dict().items()}
            )
            self.done = True


def run_loaded(rank: int, world: int, hook: str, lr: float, num_workers: int | None) -> Tensor:
    module, data = ValidatedModule(lr=lr), (make_loader(rank, STEPS), make_loader(9, 1))
    fit_with(remote_or_ddp(num_workers), module, *data, callbacks=[Loads(hook)])
    return flat(module)


@pytest.mark.parametrize(("hook", "num_tiers"), cover(HOOKS, [2, 3], strength=1))
def test_weights_loaded_before_the_first_step_are_used(
    pool: Pool, hook: str, num_tiers: int
) -> None:
    for weights in pool.run(run_loaded, hook, 0.0, 2, world=1 + num_tiers)[:2]:
        assert (weights == 5.0).all()
    found = pool.run(run_loaded, hook, 0.01, 2, world=1 + num_tiers)
    expected = pool.run(run_loaded, hook, 0.01, None, world=2)[0]
    for weights in (*found[:2], found[-1]):
        assert torch.equal(weights, expected)


def run_lr_finder(rank: int, world: int, tunes: bool) -> None:
    with all_ranks() as environment:
        strategy = RemoteOptimizerStrategy(2, timeout_s=20)
        callbacks = [] if tunes else [LearningRateFinder(num_training_steps=3)]
        trainer = remote_trainer(
            environment,
            strategy,
            max_epochs=1,
            callbacks=callbacks,
            use_distributed_sampler=False,
        )
        if tunes:
            Tuner(trainer).lr_find(TinyModule(), make_loader(rank, STEPS), num_training=3)
        else:
            trainer.fit(TinyModule(), make_loader(rank, STEPS))


@pytest.mark.parametrize("tunes", [True, False])
def test_the_learning_rate_finder_is_refused(pool: Pool, tunes: bool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(run_lr_finder, tunes, world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    for failure in caught.value.failures.values():
        assert "LearningRateFinder and Tuner.lr_find do not work with" in failure.message


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
