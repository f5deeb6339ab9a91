"""A worker is killed, raises, hangs or is frozen anywhere in fit: the others end and name it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_loco import DiLoCoStrategy, PairwiseGossipStrategy
from lightning_loco.strategies import METHODS
from tests.cases import CASES
from tests.conftest import cover
from tests.forked_jobs import Job, freeze
from tests.pool import make_trainer
from tests.small_model import ValidatedModule, make_loader

pytestmark = pytest.mark.process

TIMEOUT_S = 4.0
LONGEST_S = TIMEOUT_S + 6
STEPS = 40
PHASES = ["set-up", "start", "round", "meeting", "validation", "checkpoint", "stop"]
ALWAYS = ("raises", "round")
"""What is tested at every change."""
WORDS = {
    "frozen": "(no sign of life",
    "killed": "(no sign of life",
    "hangs": "(alive, last exchange: ",
    "raises": "LookupError: trouble",
}
LOST = {
    ("killed", 0): "worker 0, which hosts it, has ended",
    ("frozen", 0): "worker 0 is unreachable",
    ("killed", 1): "worker 1 (no sign of life",
}
TESTED_ABOVE = {"diloco", "local_sgd"}
"""The second has the rounds of the first."""


class TroubleAt(pl.Callback):
    """One worker gets into trouble in the middle of a phase, and leaves the time in a file."""

    def __init__(self, phase: str, kind: str, worker: int, file: Path) -> None:
        self.phase = phase
        self.kind = kind
        self.worker = worker
        self.file = file

    def _is_there(self, trainer: pl.Trainer, *phases: str) -> None:
        if self.phase not in phases or trainer.global_rank != self.worker:
            return
        self.file.write_text(str(time.time()))
        if self.kind == "frozen":
            freeze()
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "raises":
            raise LookupError("trouble")
        time.sleep(60)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._is_there(trainer, "set-up")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._is_there(trainer, "start")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._is_there(trainer, "round", "stop")
        if self.phase == "stop":
            time.sleep(0.1)
            if trainer.global_step == 10:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._is_there(trainer, "meeting")

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._is_there(trainer, "validation")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._is_there(trainer, "checkpoint")


def fit(rank: int, world: int, strategy: Any, trouble: TroubleAt) -> None:
    callbacks: list[pl.Callback] = [trouble]
    saves = trouble.phase == "checkpoint"
    if saves:
        callbacks.append(pl.callbacks.ModelCheckpoint(trouble.file.parent, save_last=True))
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_checkpointing=saves,
        use_distributed_sampler=False,
    )
    steps = 2000 if trouble.phase == "stop" else STEPS
    trainer.fit(ValidatedModule(), make_loader(rank, steps), make_loader(9, 2))


def survivors(strategy: Any, phase: str, kind: str, worker: int, folder: Path) -> list[str]:
    """What the others have raised, in time."""
    trouble = TroubleAt(phase, kind, worker, folder / "trouble")
    with Job(fit, strategy, trouble, world=3, group_timeout_s=TIMEOUT_S) as job:
        others = [rank for rank in range(3) if rank != worker]
        outcomes = job.outcomes(others, 60)
    began = float(trouble.file.read_text())
    for outcome in outcomes:
        assert outcome.error is not None, "it has not noticed"
        assert outcome.ended_at - began < LONGEST_S, outcome.error
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def diloco(phase: str) -> DiLoCoStrategy:
    return DiLoCoStrategy(sync_every=10_000 if phase == "stop" else 5, timeout_s=TIMEOUT_S)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "phase"), [*(("frozen", phase) for phase in PHASES), ("killed", "round")]
)
def test_worker_0_is_lost_and_with_it_the_store(kind: str, phase: str, tmp_path: Path) -> None:
    for error in survivors(diloco(phase), phase, kind, 0, tmp_path):
        assert LOST[kind, 0] in error, error


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ALWAYS,
        *(
            row
            for row in cover(
                [pytest.param(kind, marks=pytest.mark.soak) for kind in WORDS],
                PHASES[:-1],
                strength=1,
            )
            if row.values != ALWAYS
        ),
    ],
)
def test_another_worker_is_in_trouble(kind: str, phase: str, tmp_path: Path) -> None:
    who = "Worker 1 failed" if kind == "raises" else f"worker 1 {WORDS[kind]}"
    for error in survivors(diloco(phase), phase, kind, 1, tmp_path):
        assert who in error
        assert WORDS[kind] in error


def strategy_of(method: str) -> Any:
    """With rounds every few steps, or as often as there can be one."""
    if method == "pairwise_gossip":
        return PairwiseGossipStrategy(timeout_s=TIMEOUT_S)
    return CASES[method].strategy(5, timeout_s=TIMEOUT_S)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "kind", "worker", "phase"),
    cover(
        sorted(set(METHODS) - TESTED_ABOVE - {"remote_optimizer"}),
        [
            pytest.param("killed", 1, "round", id="killed-1-round"),
            pytest.param("killed", 1, "meeting", id="killed-1-meeting"),
            pytest.param("killed", 0, "round", id="killed-0-round"),
            pytest.param("frozen", 0, "round", id="frozen-0-round"),
            pytest.param("frozen", 0, "meeting", id="frozen-0-meeting"),
        ],
        strength=1,
    ),
)
def test_a_worker_is_lost_under_other_methods(
    method: str, kind: str, worker: int, phase: str, tmp_path: Path
) -> None:
    for error in survivors(strategy_of(method), phase, kind, worker, tmp_path):
        assert LOST[kind, worker] in error, error
