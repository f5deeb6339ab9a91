"""A rank of a job that trains while one rank fails."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.faults.table import REMOTE, Fault
from tests.harness.failing import KINDS, MOMENT, FailIn, failing_at
from tests.harness.pool import make_trainer
from tests.harness.small_model import ValidatedModule, make_loader
from tests.strategies.families import all_ranks, remote_trainer

STEPS = 40
SAVE_EVERY = {"checkpoint": 6, "validation": 20}
"""Phases in which checkpoints are written, and the number of steps before each."""


class StopLater(pl.Callback):
    """Requests a stop of this worker some steps after the failure."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.1)
        if trainer.global_step == 3 * MOMENT:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(rank: int, world: int, fault: Fault, folder: Path, timeout_s: float) -> None:
    """Train, and fail if this is the victim; the time of the failure is written to a file."""

    def fail() -> None:
        failure_file(folder).write_text(str(time.time()))
        KINDS[fault.kind]()

    is_victim, point = rank == fault.victim, fault.point
    callbacks: list[pl.Callback] = []
    if is_victim and point is None:
        callbacks.append(FailIn(fault.phase, fail))
    if fault.phase == "stop":
        callbacks.append(StopLater())
    saves = fault.phase in SAVE_EVERY
    if saves:
        every = SAVE_EVERY[fault.phase]
        callbacks.append(
            pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
        )
    steps = STEPS if fault.phase != "stop" else 50 * STEPS
    environment: Any = all_ranks() if fault.method in REMOTE else nullcontext()
    with environment as ranks:
        make = make_trainer if ranks is None else functools.partial(remote_trainer, ranks)
        trainer = make(
            fault.strategy(timeout_s),
            max_epochs=1,
            callbacks=callbacks,
            num_sanity_val_steps=0,
            enable_checkpointing=saves,
            use_distributed_sampler=False,
        )
        coming = itertools.count(1)
        failing = (
            failing_at(point, lambda: next(coming) == MOMENT, fail)
            if is_victim and point is not None
            else nullcontext()
        )
        with failing:
            data = make_loader(rank, steps), make_loader(9, 2)
            trainer.fit(ValidatedModule(optimizer="Adam"), *data)


def failure_file(folder: Path) -> Path:
    """Return the file with the time of the failure."""
    return folder / "failed_at"
