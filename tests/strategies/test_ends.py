"""Ranks lost after training, in validation or in a test: the others exit with an error."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_loco import DiLoCoStrategy, RemoteOptimizerStrategy
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import all_ranks, remote_trainer

TIMEOUT_S = 3.0


class Evaluated(TinyModule):
    """Its evaluations run no collectives unless ``gathers`` is set."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if self.gathers:
            dist.all_reduce(torch.zeros(1))

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return batch_idx


class Validated(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class FailIn(Callback):
    """Fails in a hook."""

    def __init__(self, hook: str, fail: Callable[[], object]) -> None:
        setattr(self, hook, lambda *_: fail())


def run_and_lose(
    rank: int, world: int, is_remote: bool, part: str, hook: str, kills: bool, gathers: bool
) -> None:
    def fail() -> None:
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no space left")

    def run(make: Callable[..., Trainer]) -> None:
        settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
        if part != "fit":
            make(**settings).fit(Evaluated(gathers), make_loader(rank, 2))
        trainer = make(callbacks=[FailIn(hook, fail)] if rank == 1 else [], **settings)
        kind = Validated if part == "validate" else Evaluated
        getattr(trainer, part)(kind(gathers), make_loader(rank, 2))

    if is_remote:
        with all_ranks() as environment:
            run(
                lambda **settings: remote_trainer(
                    environment, RemoteOptimizerStrategy(2, timeout_s=TIMEOUT_S), **settings
                )
            )
    else:
        run(
            lambda **settings: make_trainer(
                DiLoCoStrategy(sync_every=2, timeout_s=TIMEOUT_S),
                plugins=[PoolEnvironment()],
                **settings,
            )
        )


LOSSES = [
    (False, "fit", "on_train_end", True),
    (True, "fit", "on_train_end", True),
    (False, "fit", "on_train_end", False),
    (False, "test", "on_test_batch_start", True),
    (True, "validate", "on_validation_end", True),
    (True, "predict", "on_predict_batch_start", False),
]


@pytest.mark.recovery
@pytest.mark.parametrize(("is_remote", "part", "hook", "kills"), LOSSES)
def test_the_others_name_the_rank_that_is_lost(
    pool: Pool, is_remote: bool, part: str, hook: str, kills: bool
) -> None:
    world = 2 + is_remote
    with pytest.raises(PoolError) as caught:
        pool.run(run_and_lose, is_remote, part, hook, kills, False, world=world, grace_s=20)
    failures = caught.value.failures
    for rank in {0, 2} if is_remote and part == "fit" else {0}:  # rank 2 serves during fit only
        assert "orker 1" in failures[rank].message, failures[rank].message
        assert kills or "no space left" in failures[rank].message


def run_and_log(rank: int, world: int, path: Path) -> None:
    logging.getLogger("lightning_loco").addHandler(logging.FileHandler(path / str(rank)))
    run_and_lose(rank, world, False, "test", "on_test_batch_start", True, True)


@pytest.mark.recovery
def test_an_error_of_the_users_own_collective_is_explained(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(run_and_log, tmp_path, world=2, grace_s=20)
    assert "gloo" in caught.value.failures[0].message
    assert "No sign of life from worker 1." in (tmp_path / "0").read_text()
