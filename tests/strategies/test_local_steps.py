"""Local steps with Lightning: no parameter values are read, and no graph is kept."""

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
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, loss_of, make_loader

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
        self.graphs.append(trainer.strategy._loss.grad_fn)


def fit(
    rank: int, world: int, case: Case, module: type[TinyModule] = NoReads
) -> tuple[list[str], int]:
    watched = Watched(case)
    at_once = dataclasses.replace(
        case, delay=0
    )  # a step that applies a result is not only a local step
    strategy = at_once.strategy(SYNC_EVERY)
    trainer = make_trainer(strategy, max_steps=STEPS, callbacks=[watched])
    trainer.fit(module(), make_loader(rank, STEPS))
    assert watched.graphs == [None] * STEPS, case
    return watched.reads.found, trainer.global_step


def fit_each(rank: int, world: int, names: list[str]) -> dict[str, tuple[list[str], int]]:
    return {name: fit(rank, world, CASES[name]) for name in names}


@pytest.mark.parametrize("are_methods", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_local_step_reads_no_value(
    pool: Pool, are_methods: bool, subtests: pytest.Subtests
) -> None:
    names = [name for name in without_variants() if (name in METHODS) is are_methods]
    of_ranks = pool.run(fit_each, names, world=2, timeout_s=120)
    for name in names:
        with subtests.test(name):
            for results in of_ranks:
                found, steps = results[name]
                assert steps == STEPS
                assert not found, found[0]


def test_a_read_is_detected(pool: Pool) -> None:
    for found, _ in pool.run(fit, CASES["diloco"], TinyModule, world=2):
        assert "losses.append(loss.item())" in found[0]
