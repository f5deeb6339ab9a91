"""The same processes can train again, also after an error of one worker at any point."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, flat, loss_of, make_loader
from tests.strategies.families import all_ranks, fit_with, remote_trainer, strategy_of

LONG_S = 120.0
"""Longer than the test may take, so that no worker waits for it."""

METHODS = ["diloco", "async_diloco", "gasloc", "async_model_average", "pairwise_gossip"]
HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "training_step",
    "validation_step",
    "on_save_checkpoint",
]


class Validated(TinyModule):
    def validation_step(self, batch: Any) -> None:
        self.log("val", loss_of(self.model, batch), batch_size=4, sync_dist=True)


def raise_in(module: LightningModule, hook: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError(f"a bad {hook}")

    setattr(module, hook, fail)


def fit_twice(rank: int, world: int, name: str, hook: str, folder: str) -> int:
    module = Validated()
    if rank == 1:
        raise_in(module, hook)
    saving = ModelCheckpoint(folder, every_n_train_steps=3)
    data = make_loader(rank, 6), make_loader(rank, 2)
    strategies = [strategy_of(name, timeout_s=LONG_S) for _ in range(2)]
    with pytest.raises(ArithmeticError if rank == 1 else RuntimeError, match=f"a bad {hook}"):
        fit_with(strategies[0], module, *data, callbacks=[saving], enable_checkpointing=True)
    return fit_with(strategies[1], Validated(), *data).global_step


@pytest.mark.parametrize(("name", "hook"), cover(METHODS, HOOKS, strength=1))
def test_a_later_fit_trains(pool: Pool, tmp_path: Any, name: str, hook: str) -> None:
    assert pool.run(fit_twice, name, hook, str(tmp_path), world=3, timeout_s=60) == [6, 6, 6]


# ------------------------------------------------------------------ a remote optimizer

FITS = 4


def count() -> tuple[int, int]:
    """Return the number of gloo threads, and of open files and connections."""
    time.sleep(0.2)  # until ended threads and closed files are no longer listed
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return threads.count("pt_gloo_runloop\n"), len(os.listdir("/proc/self/fd"))


def fit_again_and_again(
    rank: int, world: int, num_workers: int, options: dict[str, Any]
) -> list[tuple[int, int, Tensor]]:
    """Return what is left after each fit, without a garbage collection, and the weights."""
    gc.collect()
    gc.disable()
    found = []
    try:
        with all_ranks() as environment:
            for _ in range(FITS):
                strategy = RemoteOptimizerStrategy(num_workers, timeout_s=20, **options)
                settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
                trainer = remote_trainer(environment, strategy, **settings)
                module = TinyModule()
                trainer.fit(module, make_loader(rank, 3))
                weights = flat(module)
                del trainer, strategy, module
                found.append((*count(), weights))
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize(
    ("world", "num_workers", "options"),
    [(4, 2, {}), (3, 1, {"replica_size": 2}), (4, 2, {"num_servers": 2})],
    ids=str,
)
def test_fits_are_equal_and_leave_no_threads_and_connections(
    pool: Pool, world: int, num_workers: int, options: dict[str, Any]
) -> None:
    for found in pool.run(fit_again_and_again, num_workers, options, world=world):
        threads, files, weights = zip(*found, strict=True)
        assert all(torch.equal(one, weights[0]) for one in weights)
        assert len(set(threads)) == 1, found
        assert files[-1] - files[0] < FITS, found  # other ranks may still close theirs to the store
