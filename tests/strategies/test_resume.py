"""A resumed run equals the unbroken one, wherever it was saved, stopped or killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco.rounds.mean_exchange import MeanExchange
from lightning_loco.rounds.neighbor_exchange import NeighborExchange
from tests.cases import CASES
from tests.conftest import cover
from tests.pool import Pool, PoolError, make_trainer
from tests.small_model import flat

WORLD = 2
BATCHES = 6  # of an epoch
STEPS = 27
LATEST_S = 0.03  # after the start of a step that twelve or more follow
LET_IT_BE_HEARD_S = 1.5  # the workers hear of a stop from their watchdogs, once a second
ALGORITHMS = ("local_sgd", "async_diloco", "gasloc")
MORE_ALGORITHMS = (*ALGORITHMS, "streaming_diloco", "delayed_nesterov", "noloco")
NO_VALIDATION: dict[str, Any] = {"limit_val_batches": 0}
VALIDATIONS: dict[str, dict[str, Any]] = {
    "every epoch": {"check_val_every_n_epoch": 1},
    "every 2 epochs": {"check_val_every_n_epoch": 2},
    "every 3 epochs": {"check_val_every_n_epoch": 3},
    "every 4 steps": {"check_val_every_n_epoch": None, "val_check_interval": 4},
    "every 2 steps of 2nd epochs": {"check_val_every_n_epoch": 2, "val_check_interval": 2},
    "no check before training": {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    "never": NO_VALIDATION,
}
PLACES = ("batch 8", "batch 12", "batch 18", "epoch 12", "epoch 18", "start 12")
VALIDATION_PLACES = {
    "validation 12": {*VALIDATIONS} - {"every 3 epochs", "never"},
    "validation 18": {"every epoch", "every 3 epochs"},
}
"""Where validations end, and in which runs."""
LATEST, AFTER_ALL_MOMENTS = 14, 19  # steps before an interruption is due, and when it has come
MOMENTS = ("start", "backward", "round", "validation", "file", "clock")
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Using `isinstance"),
]


class DrawingModule(pl.LightningModule):
    """Draws random numbers in training and validation, and remembers what came of it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)
        )
        self.losses: dict[int, float] = {}
        self.validated: dict[int, float] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.model(batch[0]) - batch[1]).square().mean() * random.uniform(0.5, 1.5)
        self.losses[self.global_step] = loss.item() + torch.rand(()).item()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        noise = torch.rand(()).item()
        self.validated[self.global_step] = (self.model(batch[0]) - batch[1]).sum().item() + noise

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(world: int) -> StatefulDataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(4 * BATCHES * world, 3, generator=generator)
    return StatefulDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class SaveAt(pl.Callback):
    """Saves at the places of a run that are named ``"<hook> <global step>"``."""

    def __init__(self, folder: str, places: Sequence[str]) -> None:
        self.folder = folder
        self.places = places

    def save(self, trainer: pl.Trainer, hook: str) -> None:
        place = f"{hook} {trainer.global_step}"
        if place in self.places and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/{place}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")


class Interrupt(pl.Callback):
    """Sends a signal, once: to one worker, or the one that cannot be caught to all of them.

    Args:
        number: Of the signal.
        step: Local steps before it.
        worker: Whose moment it is.
        moment: The start of the next step, the end of its backward pass, in the next round, in the
            next validation, in the next writing of a file, or some milliseconds later.
    """

    def __init__(self, number: int, step: int, worker: int, moment: str = "start") -> None:
        self.number = number
        self.step = step
        self.worker = worker
        self.moment = moment
        self.is_due = False
        self.processes: list[Any] = []

    def come(self, moment: str) -> None:
        """Send the signal, if it is due, of this worker and for this moment."""
        if not self.is_due or self.worker != dist.get_rank() or self.moment != moment:
            return
        self.is_due = False
        others = self.processes if self.number == signal.SIGKILL else []
        for process in [*(one for one in others if one != os.getpid()), os.getpid()]:
            os.kill(process, self.number)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Notice rounds and files, until the patches are undone."""
        for exchange in (MeanExchange, NeighborExchange):
            patch.setattr(exchange, "start", self.then_come(exchange.start, "round"))
        patch.setattr(os, "fsync", self.then_come(os.fsync, "file"))

    def then_come(self, function: Callable[..., Any], moment: str) -> Callable[..., Any]:
        def surrounded(*args: Any) -> Any:
            result = function(*args)
            self.come(moment)
            return result

        return surrounded

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.processes = [None] * trainer.world_size
        dist.all_gather_object(self.processes, os.getpid())

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.is_due = True
            if self.moment == "clock":
                delay_s = random.Random(self.step).uniform(0.0, LATEST_S)
                threading.Timer(delay_s, self.come, ["clock"]).start()
        self.come("start")
        listens_at = self.step if self.moment == "start" else AFTER_ALL_MOMENTS
        if self.number == signal.SIGTERM and trainer.global_step == listens_at:
            time.sleep(LET_IT_BE_HEARD_S)

    def on_after_backward(self, *_: Any) -> None:
        self.come("backward")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.come("validation")


class SaveOften(pl.Callback):
    """Overwrites one checkpoint every few steps."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder = folder
        self.every = every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            trainer.save_checkpoint(f"{self.folder}/often.ckpt")


Outcome = tuple[dict[int, float], dict[int, float], Tensor]


def fit(
    rank: int,
    world: int,
    algorithm: str,
    settings: dict[str, Any],
    dropout: float,
    folder: str,
    resume: str | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> Outcome:
    """What this worker's steps and validations gave, by global step, and its final model."""
    random.seed(rank)
    trainer = make_trainer(
        CASES[algorithm].strategy(4),
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **settings,
    )
    module = DrawingModule(dropout)
    validation = None if settings == NO_VALIDATION else [loader(1), loader(1)]
    with pytest.MonkeyPatch.context() as patch, suppress(SIGTERMException):
        for callback in callbacks:
            if isinstance(callback, Interrupt):
                callback.watch(patch)
        trainer.fit(module, loader(world), validation, ckpt_path=resume)
    state = torch.cat([flat(module), *(b.flatten() for b in module.buffers())])
    return module.losses, module.validated, state


def check_resumed(whole: Sequence[Outcome], again: Sequence[Outcome], name: str) -> None:
    """A resumed run went on at some step as the whole run did."""
    for worker, (one, other) in enumerate(zip(whole, again, strict=True)):
        step = min(other[0])
        expected = {at: loss for at, loss in one[0].items() if at >= step}
        assert other[0] == expected, f"{name}, worker {worker}: losses from step {step} on"
        validated = {at: value for at, value in one[1].items() if at > step}
        found = {at: value for at, value in other[1].items() if at > step}
        assert found == validated, f"{name}, worker {worker}: validation after step {step}"
        for at, value in other[1].items():
            assert value == one[1][at], f"{name}, worker {worker}: validation at step {at}"
        assert torch.equal(one[2], other[2]), f"{name}, worker {worker}: the final model"


@pytest.mark.parametrize(
    ("validation", "algorithm", "dropout"),
    [
        *cover(VALIDATIONS, ALGORITHMS, [0.3, 0.0], strength=1),
        pytest.param("every 4 steps", "streaming_diloco", 0.3, marks=pytest.mark.soak),
        pytest.param("every 3 epochs", "streaming_diloco", 0.3, marks=pytest.mark.soak),
        pytest.param("every 3 epochs", "delayed_nesterov", 0.3, marks=pytest.mark.soak),
        pytest.param("every epoch", "noloco", 0.3, marks=pytest.mark.soak),
    ],
)
def test_resumed_run_equals_unbroken_run(
    pool: Pool, tmp_path: Path, validation: str, algorithm: str, dropout: float
) -> None:
    """Resumed from each place of a run."""
    settings = VALIDATIONS[validation]
    save = SaveAt(str(tmp_path), [*PLACES, *VALIDATION_PLACES])
    whole = pool.run(fit, algorithm, settings, dropout, str(tmp_path), None, [save], world=WORLD)
    saved = sorted(tmp_path.glob("*.ckpt"))
    validated = [place for place, found in VALIDATION_PLACES.items() if validation in found]
    assert {path.stem for path in saved} == {*PLACES, *validated}
    for path in saved:
        again = pool.run(fit, algorithm, settings, dropout, str(tmp_path), str(path), world=WORLD)
        assert min(again[0][0]) == int(path.stem.split()[1])
        check_resumed(whole, again, f"{algorithm}, validation {validation}, from {path.stem}")


@pytest.mark.parametrize("kind", [pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGKILL"])
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_interrupted_run_equals_unbroken_run(
    pool: Pool, tmp_path: Path, kind: str, count: int
) -> None:
    """Interruptions at all moments of random steps, under random settings."""
    draw = random.Random(count)
    unbroken: dict[tuple[str, str, float], list[Outcome]] = {}
    for number in range(count):
        moment = MOMENTS[(number + 2) % len(MOMENTS)]
        algorithm = draw.choice(MORE_ALGORITHMS)
        validation = draw.choice([*VALIDATIONS][: -1 if moment == "validation" else None])
        dropout = draw.choice([0.0, 0.3])
        step = draw.randrange(6, 12 if moment == "validation" else LATEST + 1)
        worker, every = draw.randrange(WORLD), draw.choice([1, 2, 3])
        folder = tmp_path / str(number)
        folder.mkdir()
        run = algorithm, VALIDATIONS[validation], dropout, str(folder)
        name = f"{kind} {number}, {moment} after step {step} of worker {worker}: {algorithm}, "
        name += f"validation {validation}, dropout {dropout}, saved every {every}"
        key = algorithm, validation, dropout
        if key not in unbroken:
            unbroken[key] = pool.run(fit, *run, world=WORLD)
        interrupt = Interrupt(getattr(signal, kind), step, worker, moment)
        callbacks = [SaveOften(str(folder), every), interrupt]
        often, path = folder / "often.ckpt", folder / "interrupted.ckpt"
        if kind == "SIGTERM":
            broken = pool.run(fit, *run, None, callbacks, world=WORLD)
            assert max(broken[0][0]) < STEPS - 1, f"{name}: was not interrupted"
        else:
            with pytest.raises(PoolError) as error:
                pool.run(fit, *run, None, callbacks, world=WORLD)
            assert error.value.missing == [0, 1], name
        again = pool.run(fit, *run, str(path if path.exists() else often), world=WORLD)
        assert kind == "SIGKILL" or min(again[0][0]) == max(broken[0][0]) + 1, name
        check_resumed(unbroken[key], again, name)


def test_stop_at_the_end_of_an_epoch_loses_no_step(pool: Pool, tmp_path: Path) -> None:
    """It comes after the first batch of the next epoch, but all agree on it before a save."""
    run = "local_sgd", VALIDATIONS["every epoch"], 0.3, str(tmp_path)
    unbroken = pool.run(fit, *run, world=1)
    callbacks = [SaveOften(str(tmp_path), 2 * BATCHES), Interrupt(signal.SIGTERM, 11, 0)]
    broken = pool.run(fit, *run, None, callbacks, world=1)
    again = pool.run(fit, *run, str(tmp_path / "interrupted.ckpt"), world=1)
    assert min(again[0][0]) == max(broken[0][0]) + 1 == 2 * BATCHES + 1
    check_resumed(unbroken, again, "stopped at the end of an epoch")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *cover(["SIGTERM", "SIGKILL"], [9]),
        *cover(
            ["SIGTERM", "SIGKILL"],
            [pytest.param(step, marks=pytest.mark.soak) for step in (10, 11, 12)],
            strength=1,
        ),
    ],
)
def test_fragments_under_way_survive_at_each_step_of_a_phase(
    pool: Pool, tmp_path: Path, kind: str, step: int
) -> None:
    """Of two fragments, one or both are under way at each of them."""
    run = "streaming_diloco", VALIDATIONS["every 4 steps"], 0.3, str(tmp_path)
    unbroken = pool.run(fit, *run, world=WORLD)
    interrupt = Interrupt(getattr(signal, kind), step, 1)
    if kind == "SIGTERM":
        path = tmp_path / "interrupted.ckpt"
        pool.run(fit, *run, None, [interrupt], world=WORLD)
    else:
        path = tmp_path / "often.ckpt"
        with pytest.raises(PoolError):
            pool.run(fit, *run, None, [SaveOften(str(tmp_path), 1), interrupt], world=WORLD)
    files = sorted(Path(f"{path}.loco").glob("*/worker_*.pt"))
    flights = [lane["flight"] for file in files for lane in torch.load(file)["engine"]["lanes"]]
    assert any(flight is not None for flight in flights)
    check_resumed(unbroken, pool.run(fit, *run, str(path), world=WORLD), f"{kind} at {step}")
