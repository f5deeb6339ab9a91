"""A run that was stopped or killed resumes exactly, from where it was stopped or saved."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_loco import AsyncModelAverageStrategy, DiLoCoStrategy, PairwiseGossipStrategy
from lightning_loco._util.fault_points import on_reach
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.save_and_resume import (
    BATCHES,
    STEPS,
    DrawingModule,
    Outcome,
    Run,
    SaveEvery,
    check_resumed,
    files_of,
    first_steps,
    fit,
    loader,
    train_save_resume,
)

WORLD = 2
LATEST_S = 0.03  # after the start of a step that is followed by at least twelve steps
LET_IT_BE_HEARD_S = 1.5  # the workers' watchdogs check for a stop every second
ALGORITHMS = (
    "local_sgd", "sparta", "async_diloco", "gasloc", "streaming_diloco", "delayed_nesterov",
    "noloco",
)  # fmt: skip
VALIDATIONS: dict[str, dict[str, Any]] = {
    "every epoch": {"check_val_every_n_epoch": 1},
    "every 2 epochs": {"check_val_every_n_epoch": 2},
    "every 3 epochs": {"check_val_every_n_epoch": 3},
    "every 4 steps": {"check_val_every_n_epoch": None, "val_check_interval": 4},
    "every 2 steps of 2nd epochs": {"check_val_every_n_epoch": 2, "val_check_interval": 2},
    "no check before training": {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    "never": {"limit_val_batches": 0},
}
LATEST, AFTER_ALL_MOMENTS = 14, 19  # steps before an interruption is due, and after it
MOMENTS = ("start", "backward", "round", "validation", "file", "clock")
OF_POINTS = {"after sending": "round", "before a file is in its place": "file"}
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Using `isinstance"),
]


class Interrupt(pl.Callback):
    """Sends a signal once: SIGKILL to all workers, other signals to ``worker`` only.

    Args:
        number: Number of the signal.
        step: Local steps before it.
        worker: The worker that sends it.
        moment: When it is sent: start of the next step, end of its backward pass, next round, next
            validation, next write of a file, or some milliseconds later.
    """

    def __init__(self, number: int, step: int, worker: int, moment: str = "start") -> None:
        self.number = number
        self.step = step
        self.worker = worker
        self.moment = moment
        self.is_due = False
        self.processes: list[Any] = []

    def send(self, moment: str) -> None:
        """Send the signal if it is due on this worker at this moment."""
        if not self.is_due or self.worker != dist.get_rank() or self.moment != moment:
            return
        self.is_due = False
        others = self.processes if self.number == signal.SIGKILL else []
        for process in [*(one for one in others if one != os.getpid()), os.getpid()]:
            os.kill(process, self.number)

    def on_point(self, point: str) -> None:
        """Send the signal at a fault point, in a round or before a file is written."""
        if point in OF_POINTS:
            self.send(OF_POINTS[point])

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.processes = [None] * trainer.world_size
        dist.all_gather_object(self.processes, os.getpid())

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.is_due = True
            if self.moment == "clock":
                delay_s = random.Random(self.step).uniform(0.0, LATEST_S)
                threading.Timer(delay_s, self.send, ["clock"]).start()
        self.send("start")
        listens_at = self.step if self.moment == "start" else AFTER_ALL_MOMENTS
        if self.number == signal.SIGTERM and trainer.global_step == listens_at:
            time.sleep(LET_IT_BE_HEARD_S)

    def on_after_backward(self, *_: Any) -> None:
        self.send("backward")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.send("validation")


def run_of(validation: str, algorithm: str, dropout: float, folder: Path, size: int = 1) -> Run:
    """Return a run with validations at given times, of workers of ``size`` ranks."""
    return Run(
        algorithm,
        str(folder),
        sizes=size,
        dropout=dropout,
        validates=validation != "never",
        trainer=VALIDATIONS[validation],
    )


def fit_interrupted(
    rank: int, world: int, run: Run, every: int | None, interrupt: Interrupt
) -> Outcome:
    """Train until the interruption, and save every few steps."""
    save = [] if every is None else [SaveEvery(every)]
    with on_reach(interrupt.on_point):
        return fit(rank, world, replace(run, callbacks=[*save, interrupt]))


@pytest.mark.parametrize("kind", [pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGKILL"])
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_interrupted_run_equals_uninterrupted_run(
    pool: Pool, tmp_path: Path, kind: str, count: int
) -> None:
    """Interrupt at all moments of random steps, with random settings."""
    draw = random.Random(count)
    for number in range(count):
        moment = MOMENTS[(number + 2) % len(MOMENTS)]
        algorithm = draw.choice(ALGORITHMS)
        validation = draw.choice([*VALIDATIONS][: -1 if moment == "validation" else None])
        dropout = draw.choice([0.0, 0.3])
        step = draw.randrange(6, 12 if moment == "validation" else LATEST + 1)
        worker, every = draw.randrange(WORLD), draw.choice([1, 2, 3])
        run = run_of(validation, algorithm, dropout, tmp_path / str(number))
        name = f"{kind} {number}, {moment} after step {step} of worker {worker}: {algorithm}, "
        name += f"validation {validation}, dropout {dropout}, saved every {every}"
        interrupt = Interrupt(getattr(signal, kind), step, worker, moment)
        broken: list[Outcome] = []
        if kind == "SIGTERM":
            broken = pool.run(fit_interrupted, run, every, interrupt, world=WORLD)
            assert max(broken[0].losses) < STEPS - 1, f"{name}: was not interrupted"
        else:
            with pytest.raises(PoolError) as error:
                pool.run(fit_interrupted, run, every, interrupt, world=WORLD)
            assert error.value.missing == [0, 1], name
        path = Path(run.folder, "interrupted.ckpt")
        file = "interrupted.ckpt" if path.exists() else "often.ckpt"
        again = check_resumes(pool, run, file, name)
        assert kind == "SIGKILL" or min(again[0].losses) == max(broken[0].losses) + 1, name


def check_resumes(pool: Pool, run: Run, file: str, name: str, world: int = 2) -> list[Outcome]:
    """Check that a run from this file equals the uninterrupted one."""
    results = pool.run(train_save_resume, run, [file], world=world)
    whole, again = zip(*results, strict=True)
    assert len({*first_steps(again)}) == 1, name
    check_resumed(whole, again, name)
    return list(again)


def test_stop_at_the_end_of_an_epoch_loses_no_step(pool: Pool, tmp_path: Path) -> None:
    """The stop is requested in the next epoch's first batch, but all agree on it before a save."""
    run = run_of("every epoch", "local_sgd", 0.3, tmp_path)
    interrupt = Interrupt(signal.SIGTERM, 11, 0)
    (broken,) = pool.run(fit_interrupted, run, 2 * BATCHES, interrupt, world=1)
    (again,) = check_resumes(pool, run, "interrupted.ckpt", "stopped at the end of an epoch", 1)
    assert min(again.losses) == max(broken.losses) + 1 == 2 * BATCHES + 1


@pytest.mark.parametrize(
    ("kind", "step", "size"),
    [
        ("SIGTERM", 9, 1),
        ("SIGTERM", 9, 2),
        *(pytest.param("SIGTERM", step, 1, marks=pytest.mark.soak) for step in (10, 11, 12)),
        *(pytest.param("SIGKILL", step, 1, marks=pytest.mark.soak) for step in (9, 10, 11, 12)),
    ],
)
def test_pending_fragments_are_resumed_at_each_step_of_a_phase(
    pool: Pool, tmp_path: Path, kind: str, step: int, size: int
) -> None:
    """Of two fragments, one or both are pending at each step; the last rank gets the signal."""
    run, world = run_of("every 4 steps", "streaming_diloco", 0.3, tmp_path, size), 2 * size
    interrupt = Interrupt(getattr(signal, kind), step, world - 1)
    if kind == "SIGTERM":
        file = "interrupted.ckpt"
        pool.run(fit_interrupted, run, None, interrupt, world=world)
    else:
        file = "often.ckpt"
        with pytest.raises(PoolError):
            pool.run(fit_interrupted, run, step, interrupt, world=world)
    files = files_of(tmp_path / file)
    assert len(files.workers) == 2
    assert files.has_pending
    check_resumes(pool, run, file, f"{kind} at {step}", world)


class StopApart(pl.Callback):
    """Requests a stop when worker 1 is five steps ahead of worker 0."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == (3, 8)[dist.get_rank()]:
            dist.barrier()
            trainer.strategy.request_stop("SIGTERM")  # type: ignore[attr-defined]


FREE: dict[str, Callable[[], Any]] = {
    "async_model_average": lambda: AsyncModelAverageStrategy(interval_s=0.01),
    "pairwise_gossip": PairwiseGossipStrategy,
}
"""Methods whose workers do not wait for each other."""


def stop_apart_and_resume(rank: int, world: int, method: str, folder: str) -> tuple[int, int, int]:
    os.chdir(folder)
    stopped = make_trainer(FREE[method](), max_epochs=-1, callbacks=[StopApart()])
    with suppress(SIGTERMException):
        stopped.fit(DrawingModule(), loader(world))
    step, watch = stopped.global_step, FirstStep()
    resumed = make_trainer(
        FREE[method](),
        max_steps=step + 10,
        callbacks=[SaveEvery(3), watch],
        check_val_every_n_epoch=None,
        val_check_interval=4,
    )
    resumed.fit(DrawingModule(), loader(world), loader(1, 2), ckpt_path="interrupted.ckpt")
    return step, watch.step, resumed.global_step - step


class StopInLastBatch(pl.Callback):
    """Requests a stop after the last batch of worker 0's epoch; worker 1 is a batch behind."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == (2, 1)[trainer.global_rank]:
            if trainer.global_rank == 0:
                strategy.request_stop("SIGTERM")
            while not strategy.engine.worker.stop.is_seen:
                time.sleep(0.01)


def stop_at_the_end_of_one_epoch(rank: int, world: int, folder: str) -> tuple[int, bool]:
    os.chdir(folder)
    trainer = make_trainer(
        DiLoCoStrategy(sync_every=100),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[StopInLastBatch()],
    )
    with suppress(SIGTERMException):
        trainer.fit(TinyModule(), make_loader(rank, (3, 8)[rank]))
    return trainer.global_step, os.path.exists("interrupted.ckpt")


def test_a_worker_whose_epoch_ends_with_the_last_step_stops_with_the_others(
    pool: Pool, tmp_path: Path
) -> None:
    """It waits at the end of the epoch, which the others do not reach."""
    assert pool.run(stop_at_the_end_of_one_epoch, str(tmp_path), world=2) == [(3, True)] * 2


class FirstStep(pl.Callback):
    """Records the step at which training starts."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step


@pytest.mark.parametrize("method", FREE)
def test_workers_that_do_not_wait_stop_at_one_step(pool: Pool, tmp_path: Path, method: str) -> None:
    """Otherwise workers would meet at different saves and validations."""
    first, second = pool.run(stop_apart_and_resume, method, str(tmp_path), world=WORLD)
    step, *rest = first
    assert step >= 8
    assert rest == [step, 10]
    assert first == second
