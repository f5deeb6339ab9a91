"""Train in the pool, save, go on from what was saved, and compare with the unbroken run."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.cases import Case
from tests.pool import make_trainer
from tests.small_model import flat

BATCHES = 6  # of an epoch
STEPS = 27
SYNC_EVERY = 4


class DrawingModule(pl.LightningModule):
    """Draws random numbers in training and validation, and remembers what came of it.

    With dropout, BatchNorm, AdamW and a schedule: all that a resume must keep.
    """

    def __init__(self, dropout: float = 0.3) -> None:
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
        error = self.model(batch[0]) - batch[1]
        self.log("val", error.square().mean(), sync_dist=True)
        self.validated[self.global_step] = error.sum().item() + torch.rand(()).item()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(world: int, batches: int = BATCHES) -> StatefulDataLoader[Any]:
    """The batches of an epoch for each worker, shuffled and dealt out by Lightning's sampler."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(4 * batches * world, 3, generator=generator)
    return StatefulDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class SaveAt(pl.Callback):
    """Saves at the places of a run that are named ``"<hook> <global step>"``."""

    def __init__(self, *places: str) -> None:
        self.places = places

    def save(self, trainer: pl.Trainer, hook: str) -> None:
        place = f"{hook} {trainer.global_step}"
        if place in self.places and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{place}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")


class SaveEvery(pl.Callback):
    """Saves every so many steps, to one path unless it has a place for a number."""

    def __init__(self, every: int, path: str = "often.ckpt", weights_only: bool = False) -> None:
        self.every = every
        self.path = path
        self.weights_only = weights_only

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            path = self.path.format(trainer.global_step // self.every)
            trainer.save_checkpoint(path, weights_only=self.weights_only)


@dataclass(frozen=True)
class Run:
    """How the workers train.

    Args:
        case: The method.
        folder: In which they are; all paths are relative to it. A list has one for each worker.
        callbacks: Of the Trainer.
        max_steps: When it ends.
        dropout: Of the module.
        validates: Whether there are data for validation: two loaders.
        strategy: More settings of the strategy.
        trainer: More settings of the Trainer.
    """

    case: Case
    folder: str | Sequence[str]
    callbacks: Sequence[pl.Callback] = ()
    max_steps: int = STEPS
    dropout: float = 0.3
    validates: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What a run gave on one worker.

    Attributes:
        losses: Of its steps, by global step.
        validated: What its validations saw, by global step.
        state: Its final model with its buffers.
        told: What the run was warned of because other workers had written its checkpoint.
    """

    losses: dict[int, float]
    validated: dict[int, float]
    state: Tensor
    told: list[str]


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """What is said of workers that go on from the checkpoint of others."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", "(?s).*go on from it")
        yield told
    told += [str(warning.message) for warning in found]


def fit(rank: int, world: int, run: Run, resume: str | None = None) -> Outcome:
    """Train, perhaps from a checkpoint."""
    folder = run.folder if isinstance(run.folder, str) else run.folder[rank]
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    random.seed(rank)
    trainer = make_trainer(
        run.case.strategy(SYNC_EVERY, **run.strategy),
        max_steps=run.max_steps,
        default_root_dir=".",
        callbacks=[*run.callbacks],
        **run.trainer,
    )
    module = DrawingModule(run.dropout)
    validation = [loader(1, 2), loader(1, 2)] if run.validates else None
    with noted_warnings() as told, suppress(SIGTERMException):
        trainer.fit(module, loader(world), validation, ckpt_path=resume)
    state = torch.cat([flat(module), *(b.flatten() for b in module.buffers())])
    return Outcome(module.losses, module.validated, state, told)


def resume_each(rank: int, world: int, run: Run, paths: Sequence[str | None]) -> list[Outcome]:
    """The same run from each of these checkpoints, in one job of the pool."""
    return [fit(rank, world, copy.deepcopy(run), path) for path in paths]


def train_save_resume(
    rank: int, world: int, run: Run, paths: Sequence[str | None], again: Run | None = None
) -> list[Outcome]:
    """The unbroken run, then the same or another one from each of the files that it has saved."""
    whole = fit(rank, world, copy.deepcopy(run))
    return [whole, *resume_each(rank, world, again or run, paths)]


def check_resumed(whole: Sequence[Outcome], again: Sequence[Outcome], name: str) -> None:
    """A resumed run went on at some step as the whole run did, bit for bit."""
    for worker, (one, other) in enumerate(zip(whole, again, strict=True)):
        step = min(other.losses)
        expected = {at: loss for at, loss in one.losses.items() if at >= step}
        assert other.losses == expected, f"{name}, worker {worker}: losses from step {step} on"
        validated = {at: value for at, value in one.validated.items() if at > step}
        found = {at: value for at, value in other.validated.items() if at > step}
        assert found == validated, f"{name}, worker {worker}: validation after step {step}"
        for at, value in other.validated.items():
            assert value == one.validated[at], f"{name}, worker {worker}: validation at step {at}"
        assert torch.equal(one.state, other.state), f"{name}, worker {worker}: the final model"


def first_steps(outcomes: Sequence[Outcome]) -> list[int]:
    """The global step at which each worker began."""
    return [min(outcome.losses) for outcome in outcomes]


def files_in(folder: Path) -> list[str]:
    """All files below a folder, with ``S`` for the stamp of a save."""
    found = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    return sorted(
        "/".join("S" if part.startswith("step") and "-" in part else part for part in file.parts)
        for file in found
    )
