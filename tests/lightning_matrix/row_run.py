"""Parts of a row of the matrix: a trainer, a model, data, and facts to compare."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import DiLoCoStrategy, LocoModelParallelStrategy
from lightning_loco.strategies import METHODS
from tests.harness.pool import PoolEnvironment, make_trainer
from tests.strategies.families import all_ranks, take_group_away

WORKERS = 2
BATCHES = 4
"""Batches of an epoch for each worker."""

EPOCHS = 2
SYNC_EVERY = 2
SAMPLES = WORKERS * BATCHES * 2

Facts = dict[str, Any]
"""Facts that a row reports of a run; equal for DDP and a strategy that behaves like DDP."""

REMOTE = "remote_optimizer"
DDP_INSIDE, FSDP_INSIDE = "diloco, DDP inside", "diloco, FSDP2 inside"
"""Two workers of two ranks each, which are compared with DDP on four ranks."""

RANKS_PER_WORKER = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "sparta": {"sync_every": SYNC_EVERY, "fraction": 0.25},
    "streaming_diloco": {"sync_every": SYNC_EVERY, "fragments": 2, "delay": 1},
    "async_model_average": {"interval_s": 0.0},
    "pairwise_gossip": {"fetch_probability": 1.0},
    REMOTE: {"num_workers": WORKERS},
}
"""Arguments by strategy; other strategies run rounds every few steps."""

_ranks_per_worker = 1
"""Number of ranks per worker of the run in this process."""


def make_strategy(name: str, ddp_arguments: dict[str, Any]) -> Strategy:
    """Make DDP, a method by its registered name, or one with workers of two ranks."""
    if name == "ddp":
        return DDPStrategy(**ddp_arguments)
    if name == DDP_INSIDE:
        ranks = {"replica_size": RANKS_PER_WORKER, **ddp_arguments}
        return DiLoCoStrategy(SYNC_EVERY, timeout_s=10.0, **ranks)
    if name == FSDP_INSIDE:
        method = DiLoCoStrategy(SYNC_EVERY, timeout_s=10.0)
        # Rows read checkpoints as files.
        sizes = {"data_parallel_size": RANKS_PER_WORKER, "save_distributed_checkpoint": False}
        return LocoModelParallelStrategy(method, **sizes)
    return METHODS[name](timeout_s=10.0, **SETTINGS.get(name, {"sync_every": SYNC_EVERY}))  # type: ignore[call-arg]


@dataclasses.dataclass
class RowRun:
    """One run of a row with one strategy, on one rank.

    Args:
        strategy_name: A method's name, or ``"ddp"``.
        rank: This rank.
        folder: Folder for files of all ranks of this run.
        environment: The ranks.

    Attributes:
        models: Weights that must be equal on all workers.
        written: The final weights, and the weights that callbacks wrote on this worker.
    """

    strategy_name: str
    rank: int
    folder: Path
    environment: ClusterEnvironment
    models: list[Tensor] = dataclasses.field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    @property
    def worker(self) -> int:
        """The worker of this rank."""
        return self.rank // _ranks_per_worker

    @property
    def serves(self) -> bool:
        """Whether this rank is a server, which reports no facts."""
        return self.strategy_name == REMOTE and self.rank >= WORKERS

    def trainer(self, ddp_arguments: dict[str, Any] | None = None, **settings: Any) -> Trainer:
        """Make a quiet trainer of two short epochs, without a sanity check.

        Args:
            ddp_arguments: Arguments that only DDP needs.
            settings: Replace or add to the defaults.
        """
        defaults: dict[str, Any] = {
            "devices": self.environment.world_size(),
            "plugins": [self.environment],
            "max_epochs": EPOCHS,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "default_root_dir": self.folder,
        }
        plugins = [self.environment, *settings.pop("plugins", [])]
        strategy = make_strategy(self.strategy_name, ddp_arguments or {})
        return make_trainer(strategy, **{**defaults, **settings, "plugins": plugins})

    def facts(self, trainer: Trainer, module: Model, **more: Any) -> Facts:
        """Return facts that every row compares; weights must be equal on all workers, and finite.

        Args:
            trainer: After its last call.
            module: The trained module.
            more: Additional facts of this row.
        """
        self.must_be_equal(module)
        state = {"steps": trainer.global_step, "epochs": trainer.current_epoch}
        return {**state, **module.calls, **more}

    def files(self, pattern: str) -> list[str]:
        """Return the names of this run's files, on the rank that writes them."""
        return sorted(path.name for path in self.folder.glob(pattern)) if self.rank == 0 else []

    def must_be_equal(self, module: nn.Module) -> None:
        """Require this module to be equal on all workers now."""
        self.models.append(weights(module))

    def must_be_the_mean(self, module: nn.Module, written: Tensor) -> None:
        """Require this module to be the mean of what each worker has written into it."""
        self.written.append((weights(module), written))


class Model(LightningModule):
    """Least squares with two layers; counts calls of its methods.

    Args:
        lr: Learning rate of SGD; with 0 only other code can change the weights.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = self.make_layers()
        self.lr = lr
        self.calls: Counter[str] = Counter()

    def make_layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def configure_model(self) -> None:
        is_sharded = isinstance(self.layers, FSDPModule)  # counted by an earlier call
        if self.device_mesh is not None and not is_sharded:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self(inputs) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["training_step"] += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["validation_step"] += 1
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["test_step"] += 1
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls["predict_step"] += 1
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        self.calls["on_train_epoch_end"] += 1

    def on_validation_epoch_end(self) -> None:
        self.calls["on_validation_epoch_end"] += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def samples(number: int = SAMPLES, seed: int = 0) -> TensorDataset:
    """Return inputs and targets, equal on every rank; twice as many for twice as many ranks."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number * _ranks_per_worker, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(number: int = SAMPLES, seed: int = 0, **settings: Any) -> DataLoader[Any]:
    """Return batches of two samples; Lightning distributes them over the workers."""
    return DataLoader(samples(number, seed), batch_size=2, **settings)


def weights(module: nn.Module) -> Tensor:
    """Return all parameters in one vector of float64."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().reshape(-1).double() for p in whole])


def fill(module: nn.Module, value: float) -> None:
    """Set all parameters to a value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def are_all(module: nn.Module, value: float) -> bool:
    """Return whether all parameters are close to a value."""
    found = weights(module)
    return torch.allclose(found, torch.full_like(found, value), atol=1e-5)


@dataclasses.dataclass
class Outcome:
    """The outcome of a run on one rank.

    Attributes:
        facts: The facts of the row; empty on servers.
        models: Weights that must be equal on all workers.
        written: Pairs of weights; the first must be the mean of the second over the workers.
        error: Type and text of an error.
    """

    facts: Facts = dataclasses.field(default_factory=dict)
    models: list[Tensor] = dataclasses.field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    error: str = ""


@contextmanager
def group_of_queue(rank: int, size: int = WORKERS) -> Iterator[ClusterEnvironment]:
    """Create a process group of some ranks of the pool's call, for the runs of a queue."""
    queue, member = divmod(rank, size)
    store = dist.distributed_c10d._get_default_store()
    take_group_away()
    store = dist.PrefixStore(f"queue{queue}", store)
    dist.init_process_group("gloo", store=store, rank=member, world_size=size)
    yield PoolEnvironment()


def run_row(
    rank: int, world: int, queues: list[list[str]], row: Callable[[RowRun], Facts], folder: str
) -> dict[str, Outcome]:
    """Run a row with some strategies; return the outcomes on this rank.

    Args:
        rank: Rank in the pool's call.
        world: Two ranks for each queue, or all ranks of a remote optimizer.
        queues: Strategies that run one after the other, in parallel with those of other queues.
        row: The row to run.
        folder: Folder for files.
    """
    if queues == [[REMOTE]]:
        with all_ranks() as environment:
            return {REMOTE: run_one(rank, REMOTE, row, Path(folder) / REMOTE, environment)}
    worker, names = rank % WORKERS, queues[rank // WORKERS]
    with group_of_queue(rank) as environment:
        return {
            name: run_one(worker, name, row, Path(folder) / name, environment) for name in names
        }


def run_row_of_ranks(
    rank: int, world: int, name: str, row: Callable[[RowRun], Facts], folder: str
) -> Outcome:
    """Run a row on four ranks, with DDP or with two workers of two ranks.

    Args:
        rank: This rank.
        world: Four.
        name: ``"ddp"``, ``DDP_INSIDE`` or ``FSDP_INSIDE``.
        row: The row to run.
        folder: Folder for files.
    """
    global _ranks_per_worker
    with group_of_queue(rank, world) as environment:
        _ranks_per_worker = RANKS_PER_WORKER
        try:
            return run_one(rank, name, row, Path(folder), environment)
        finally:
            _ranks_per_worker = 1


def run_one(
    rank: int,
    name: str,
    row: Callable[[RowRun], Facts],
    folder: Path,
    environment: ClusterEnvironment,
) -> Outcome:
    """Run a row with one strategy."""
    folder.mkdir(exist_ok=True)
    run = RowRun(name, rank, folder, environment)
    try:
        facts = row(run)
    except Exception as error:
        return Outcome(error=described(error))
    return Outcome() if run.serves else Outcome(facts, run.models, run.written)


def described(error: BaseException) -> str:
    """Return type and text of an error, and of its cause."""
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text}\ncaused by {described(error.__cause__)}"
