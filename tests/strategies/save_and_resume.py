"""Train in the pool, save, resume, and compare with the uninterrupted run."""

from __future__ import annotations

import copy
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCo,
    GASLoC,
    PairwiseGossipStrategy,
)
from lightning_loco.compression import ErrorFeedback, Int8
from tests.cases import CASES, Case
from tests.harness.pool import Pool, make_trainer
from tests.strategies.families import Family, ShardedModule, Sizes, as_pair, whole

BATCHES = 6  # steps in an epoch
STEPS = 27
SYNC_EVERY = 4
INT8 = Int8(8)  # its blocks span several of the few parameters


def pairwise(sync_every: int, **arguments: Any) -> PairwiseGossipStrategy:
    """Return a strategy without rounds."""
    return PairwiseGossipStrategy(1.0, **arguments)


METHODS: dict[str, Case | Callable[..., Any]] = {
    **CASES,
    "diloco, feedback": Case(DiLoCo(), compression=ErrorFeedback(INT8)),
    "async_diloco, feedback": Case(DiLoCo(0.7, 0.3), overlap=True, compression=ErrorFeedback(INT8)),
    "fragments": Case(DiLoCo(0.4, 0.3), fragments=2, delay=3, mix=0.5),
    "async_diloco of fragments": partial(AsyncDiLoCoStrategy, fragments=2),
    "gasloc, int8": Case(GASLoC(momentum=0.3), "ring", compression=INT8),
    "gasloc_overlap, int8": Case(GASLoC(), "ring", overlap=True, compression=INT8),
    "pairwise": pairwise,
}


def maker_of(method: str | Case) -> Callable[..., Any]:
    """Return a function that makes the strategy, from ``sync_every`` and other arguments."""
    case = METHODS[method] if isinstance(method, str) else method
    return case.strategy if isinstance(case, Case) else case


class DrawingModule(pl.LightningModule):
    """Draws random numbers in training and validation, and records the results.

    With dropout, BatchNorm, AdamW and a schedule: all states that a resume must restore.
    """

    norm: type[nn.Module] = nn.BatchNorm1d

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(3, 8), self.norm(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)
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


class ShardedDrawing(DrawingModule, ShardedModule):
    """Sharded by its user; FSDP2 gives no elements of the last layer to the second rank."""

    norm = nn.LayerNorm


def loader(readers: int, batches: int = BATCHES) -> StatefulDataLoader[Any]:
    """Return a reader's batches of an epoch, shuffled and divided by Lightning's sampler."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(4 * batches * readers, 3, generator=generator)
    return StatefulDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class SaveAt(pl.Callback):
    """Saves twice at points named ``"<hook> <global step>"``, so that files are replaced."""

    def __init__(self, *points: str) -> None:
        self.points = points

    def save(self, trainer: pl.Trainer, hook: str) -> None:
        point = f"{hook} {trainer.global_step}"
        if point in self.points and not trainer.sanity_checking:
            for _ in range(2):
                trainer.save_checkpoint(f"{point}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")


class SaveEvery(pl.Callback):
    """Saves every few steps, to one path unless its format string contains the step."""

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
    """A training run.

    Args:
        method: The method, or its name in ``METHODS``.
        folder: The workers' working folder, or a list with one folder for each worker.
        callbacks: Callbacks of the Trainer.
        max_steps: Steps of the run.
        dropout: Dropout of the module.
        validates: Whether there are two loaders for validation.
        strategy: More settings of the strategy.
        trainer: More settings of the Trainer.
        sizes: Ranks of a worker.
        module: Makes the module; default: by ``sizes``.
        in_folder: Whether ranks that shard the model save to a folder.
    """

    method: str | Case
    folder: str | Sequence[str]
    callbacks: Sequence[pl.Callback] = ()
    max_steps: int = STEPS
    dropout: float = 0.3
    validates: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes = None
    module: Callable[[float], DrawingModule] | None = None
    in_folder: bool = True

    def make_strategy(self) -> Any:
        make = partial(maker_of(self.method), SYNC_EVERY)
        return Family(make, self.sizes, in_folder=self.in_folder).strategy(**self.strategy)

    def make_module(self) -> DrawingModule:
        is_sharded = isinstance(self.sizes, tuple)
        return (self.module or (ShardedDrawing if is_sharded else DrawingModule))(self.dropout)


class Outcome(NamedTuple):
    """Results of a run on one worker.

    Attributes:
        losses: Losses of its steps, by global step.
        validated: Results of its validations, by global step.
        state: State of its final model, with buffers.
        warned: Warnings that other workers had written its checkpoint.
    """

    losses: dict[int, float]
    validated: dict[int, float]
    state: Tensor
    warned: list[str]


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yield a list that collects warnings about checkpoints of other workers."""
    warned: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", "(?s).*go on from it")
        yield warned
    warned += [str(warning.message) for warning in found]


def fit(rank: int, world: int, run: Run, resume: str | None = None) -> Outcome:
    """Train, from a checkpoint if there is one."""
    folder = run.folder if isinstance(run.folder, str) else run.folder[rank]
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    reader, readers = (n // as_pair(run.sizes)[1] for n in (rank, world))
    trainer = make_trainer(
        run.make_strategy(),
        max_steps=run.max_steps,
        default_root_dir=".",
        callbacks=[*run.callbacks],
        **run.trainer,
    )
    module = run.make_module()
    random.seed(reader)
    torch.manual_seed(100 + reader)
    data = [loader(readers), *([[loader(1, 2), loader(1, 2)]] if run.validates else [])]
    with recorded_warnings() as warned, suppress(SIGTERMException):
        trainer.fit(module, *data, ckpt_path=resume)
    state = torch.cat([whole(module), *(b.flatten() for b in module.buffers())])
    return Outcome(module.losses, module.validated, state, warned)


def resume_each(rank: int, world: int, run: Run, paths: Sequence[str | None]) -> list[Outcome]:
    """Resume the same run from each of these checkpoints, in one job of the pool."""
    return [fit(rank, world, copy.deepcopy(run), path) for path in paths]


def train_save_resume(
    rank: int, world: int, run: Run, paths: Sequence[str | None], again: Run | None = None
) -> list[Outcome]:
    """Make the uninterrupted run, then resume it or another run from each saved file."""
    whole = fit(rank, world, copy.deepcopy(run))
    return [whole, *resume_each(rank, world, again or run, paths)]


def check_resumed(whole: Sequence[Outcome], again: Sequence[Outcome], name: str) -> None:
    """Check that a resumed run equals the whole run from a step on, bit for bit."""
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


def check_exact(
    pool: Pool,
    run: Run,
    points: Sequence[str],
    world: int,
    save: Sequence[pl.Callback] | None = None,
) -> list[Sequence[Outcome]]:
    """Save a run at some points, and check that it resumes exactly from each.

    Args:
        pool: The processes.
        run: The run.
        points: ``<hook> <step>`` or ``step=<step>``: names of checkpoints without ``.ckpt``.
        world: Number of ranks.
        save: Further callbacks of the first run, which save; default: :class:`SaveAt`.

    Returns:
        The outcomes of the uninterrupted run, and those from each point.
    """
    callbacks = [*run.callbacks, *([SaveAt(*points)] if save is None else save)]
    paths, first = [f"{point}.ckpt" for point in points], replace(run, callbacks=callbacks)
    results = pool.run(train_save_resume, first, paths, run, world=world)
    whole, *resumed = zip(*results, strict=True)
    for point, outcomes in zip(points, resumed, strict=True):
        assert first_steps(outcomes) == [int(re.split("[ =]", point)[1])] * world
        assert all(outcome.warned == [] for outcome in outcomes)
        check_resumed(whole, outcomes, f"from {point}")
    return [whole, *resumed]


def first_steps(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the global step at which each worker started."""
    return [min(outcome.losses) for outcome in outcomes]


class Files(NamedTuple):
    """The contents of a checkpoint."""

    main: dict[str, Any]
    shared: dict[str, Any]
    workers: list[dict[str, Any]]

    @property
    def consensus(self) -> Tensor:
        return torch.cat([value.reshape(-1) for value in self.main["state_dict"].values()])

    def of_fragment(self, worker: int) -> dict[str, Any]:
        """Return the state of a worker's algorithm."""
        source = self.shared or self.workers[worker]["engine"]
        state: dict[str, Any] = source["shared"][0]["state"]
        return state

    @property
    def has_pending(self) -> bool:
        """Whether a fragment of the first worker has a pending round."""
        fragments = self.workers[0]["engine"]["fragments"]
        return any(fragment["pending"] is not None for fragment in fragments)


def files_of(path: Path) -> Files:
    """Read a checkpoint; of a main file that is a folder, what is not sharded."""
    (folder,) = Path(f"{path}.loco").iterdir()
    shared, main = folder / "shared.pt", path / "meta.pt" if path.is_dir() else path
    workers = [torch.load(file) for file in sorted(folder.glob("worker_*.pt"))]
    return Files(torch.load(main), torch.load(shared) if shared.exists() else {}, workers)


def files_in(folder: Path) -> list[str]:
    """List all files below a folder, with ``S`` for the stamp of a save."""
    found = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    return sorted(
        "/".join("S" if part.startswith("step") and "-" in part else part for part in file.parts)
        for file in found
    )
