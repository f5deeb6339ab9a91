"""Trainer.fit on a backend whose ``wait`` returns at once: tests/harness/late_backend.py."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.cases import CASES
from tests.harness.late_backend import DELAY_S, LateGroup, late_messages
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader

METHODS = ["diloco", "async_diloco", "gasloc", "gasloc_overlap", "streaming_diloco"]
SYNC_EVERY = 4
TIMEOUT_S = 2.0
LATEST_S = TIMEOUT_S + 6.0


# ------------------------------------------------------------------------ the same numbers


class Run(NamedTuple):
    """Results of a worker's training."""

    model: Tensor
    losses: list[float]
    val_loss: float
    saved: dict[str, Tensor]
    wait_s: float
    is_late: bool


class RecordBackend(Callback):
    """Records whether messages use the late backend."""

    is_late = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.is_late = isinstance(trainer.strategy.group.data, LateGroup)


def train(rank: int, world: int, name: str, late: bool, folder: Path) -> Run:
    """Train two epochs with validations and checkpoints between rounds."""
    strategy, module = CASES[name].strategy(SYNC_EVERY), ValidatedModule()
    recorder = RecordBackend()
    with late_messages() if late else nullcontext():
        trainer = make_trainer(
            strategy,
            max_epochs=2,
            use_distributed_sampler=False,
            callbacks=[recorder, ModelCheckpoint(folder, filename="saved")],
            enable_checkpointing=True,
        )
        trainer.fit(module, make_loader(rank, 10), make_loader(rank, 2))
    val_loss = trainer.callback_metrics["val_loss"].item()
    saved = torch.load(folder / "saved.ckpt", weights_only=True)["state_dict"]
    wait_s = strategy.statistics.wait_s
    return Run(flat(module), module.losses, val_loss, saved, wait_s, recorder.is_late)


@pytest.mark.parametrize(
    "name",
    [
        "gasloc_overlap",
        "streaming_diloco",
        pytest.param("diloco", marks=pytest.mark.soak),
        pytest.param("async_diloco", marks=pytest.mark.soak),
        pytest.param("gasloc", marks=pytest.mark.soak),
    ],
)
def test_a_fit_equals_that_on_gloo(pool: Pool, tmp_path: Path, name: str) -> None:
    on_gloo, on_late = (
        pool.run(train, name, late, tmp_path / str(late), world=3) for late in (False, True)
    )
    for expected, found in zip(on_gloo, on_late, strict=True):
        assert (expected.is_late, found.is_late) == (False, True)
        assert torch.equal(found.model, expected.model)
        assert found.losses == expected.losses
        assert found.val_loss == expected.val_loss
        assert found.wait_s > 3 * DELAY_S
        assert found.saved.keys() == expected.saved.keys()
        assert all(torch.equal(found.saved[key], expected.saved[key]) for key in found.saved)


# --------------------------------------------------------------------------------- faults


class Fault(Callback):
    """Kills or freezes worker 1 in a phase, after some complete rounds."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.began = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 2 * SYNC_EVERY + 1:
            return
        self.began = time.monotonic()
        if trainer.global_rank == 1 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 1:
            time.sleep(LATEST_S)


def lose_a_worker(rank: int, world: int, name: str, how: str) -> tuple[str, float]:
    """Return the error of a worker, and the seconds from the fault to the error."""
    fault = Fault(how)
    with late_messages():
        trainer = make_trainer(
            CASES[name].strategy(SYNC_EVERY, timeout_s=TIMEOUT_S),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[fault],
        )
        with pytest.raises(RuntimeError) as raised:
            trainer.fit(TinyModule(), make_loader(rank, 60))
    lasted_s = time.monotonic() - fault.began
    if how == "killed":
        assert lasted_s < LATEST_S
        raise RuntimeError(
            str(raised.value)
        )  # the pool returns no results without the result of worker 1
    return str(raised.value), lasted_s


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("name", METHODS)
def test_a_worker_that_never_sends_is_named_in_time(pool: Pool, name: str) -> None:
    found = pool.run(lose_a_worker, name, "asleep", world=3)
    for error, lasted_s in (found[0], found[2]):
        assert "No message in round" in error
        assert "worker 1 (alive, last exchange: " in error
        assert TIMEOUT_S / 2 < lasted_s < LATEST_S


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "diloco" else pytest.mark.soak) for name in METHODS],
)
def test_a_killed_worker_is_named_in_time(pool: Pool, name: str) -> None:
    with pytest.raises(PoolError) as raised:
        pool.run(lose_a_worker, name, "killed", world=3, grace_s=LATEST_S)
    assert raised.value.missing == [1]
    for rank in (0, 2):
        assert "worker 1 (no sign of life; last seen in " in raised.value.failures[rank].message
