"""Families of strategies: how each trains in a pool job, and drivers for comparisons."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    NoLoCoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies import METHODS as REGISTERED
from tests.cases import CASES, Case
from tests.harness.pool import Pool, PoolEnvironment, make_trainer
from tests.harness.programs import free_ports
from tests.harness.small_model import FEATURES, TinyModule, ValidatedModule, flat, worker_batch

Sizes = int | tuple[int, int] | None
"""``replica_size``, or ``data_parallel_size`` and ``tensor_parallel_size``; None: one rank."""

TOLERANCE = 1e-11
MOST_PARTS = 4
SHARDED: dict[str, tuple[int, int]] = {"fsdp": (2, 1), "tensor": (1, 2), "both": (2, 2)}
"""In a pool of four ``both`` is one worker."""
LAYOUTS: dict[str, Sizes] = {
    "ddp": 2,
    **SHARDED,
    "ddp of 3": 3,
    "fsdp of 3": (3, 1),
    "tensor of 3": (1, 3),
    "fsdp of 4": (4, 1),
}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a worker: rows are divided into parts, and some parts are read."""

    def __init__(self, worker: int, parts: list[int], num_steps: int) -> None:
        self.worker = worker
        self.parts = parts
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        found = [worker_batch(MOST_PARTS * self.worker + part, step) for part in self.parts]
        inputs, targets = zip(*found, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class ShardedModule(ValidatedModule):
    """A small model whose layers are sharded in ``configure_model``, as by a user.

    Its last layer has one output: FSDP2 gives no elements of it to the second rank.
    """

    hidden = 6

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer=optimizer)
        torch.manual_seed(3)
        self.model = self.build().double()
        self.seen: list[Any] = []

    def build(self) -> nn.Module:
        layers = nn.Linear(FEATURES, self.hidden), nn.Tanh(), nn.LayerNorm(self.hidden)
        return nn.Sequential(*layers, nn.Linear(self.hidden, 1))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or any(isinstance(p, DTensor) for p in self.parameters()):
            return
        if mesh["tensor_parallel"].size() > 1:
            self.parallelize(mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1 or mesh.size() == 1:  # Lightning requires a DTensor
            self.shard(mesh["data_parallel"])

    def parallelize(self, mesh: DeviceMesh) -> None:
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(self.model, mesh, plan)

    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class HybridModule(ShardedModule):
    """Sharded over half of the ranks of a worker; the other half has copies of the shards."""

    def shard(self, mesh: DeviceMesh) -> None:
        strategy: Any = self.trainer.strategy
        shape = strategy.num_workers, 2, strategy.replica_size // 2
        names = "worker", "replicate", "shard"
        made = init_device_mesh("cpu", shape, mesh_dim_names=names)
        super().shard(made[names[1:]])


class SequenceModule(ShardedModule):
    """With rows and columns that tensor parallelism splits, and LayerNorm over rows of the batch.

    Gradients of LayerNorm are partial sums there.
    """

    def build(self) -> nn.Module:
        first = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4)
        return nn.Sequential(*first, nn.Linear(4, 2), nn.Linear(2, 1))

    def parallelize(self, mesh: DeviceMesh) -> None:
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0),
            "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        parallelize_module(self.model, mesh, plan)


@dataclasses.dataclass(frozen=True)
class Family:
    """Strategies that train in the same way, with two workers in a pool job.

    Args:
        make: Makes a strategy, from its arguments.
        sizes: Ranks of a worker.
        servers: Ranks that serve the optimizer, without a worker.
        in_folder: Whether ranks that shard the model save to a folder.
    """

    make: Callable[..., Any]
    sizes: Sizes = None
    servers: int = 0
    in_folder: bool = True

    @property
    def size(self) -> int:
        """Number of ranks of a worker."""
        return size_of(self.sizes)

    @property
    def world(self) -> int:
        """Number of ranks of two workers."""
        return 2 * self.size + self.servers

    def strategy(self, **arguments: Any) -> Any:
        if isinstance(self.sizes, tuple):
            recipe, folder = self.make(**arguments), self.in_folder
            return LocoModelParallelStrategy(
                recipe, *self.sizes, save_distributed_checkpoint=folder
            )
        if self.sizes is not None:
            arguments["replica_size"] = self.sizes
        return self.make(**arguments)

    def loader(self, rank: int, steps: int) -> DataLoader[Any]:
        """Return the loader of a rank."""
        return loader(rank, self.sizes, steps)

    def fit(
        self, rank: int, module: TinyModule, steps: int, arguments: dict[str, Any], **settings: Any
    ) -> Trainer:
        """Train one epoch, by default, and validate if the module can."""
        data = [self.loader(rank, steps)]
        if isinstance(module, ValidatedModule):
            data.append(self.loader(rank, 2))
        return fit_with(self.strategy(**arguments), module, *data, **settings)


rounds = functools.partial(DiLoCoStrategy, sync_every=3)
gossip = functools.partial(PairwiseGossipStrategy, 1.0)
by_clock = functools.partial(AsyncModelAverageStrategy, 0.01)
remote = functools.partial(RemoteOptimizerStrategy, 2)
FAMILIES: dict[str, Family] = {
    "rounds": Family(rounds),
    "by clock": Family(by_clock),
    "gossip": Family(gossip),
    "remote": Family(remote, servers=1),
    "remote, 3 tiers": Family(remote, servers=2),
    "rounds of ranks": Family(rounds, 2),
    "by clock of ranks": Family(by_clock, 2),
    "gossip of ranks": Family(gossip, 2),
    "fsdp": Family(rounds, (2, 1)),
    "tensor": Family(rounds, (1, 2)),
}


METHODS: dict[str, tuple[Callable[..., LocoStrategy], dict[str, Any]]] = {
    "local_sgd": (LocalSGDStrategy, {}),
    "diloco": (DiLoCoStrategy, {"outer_momentum": 0.5}),
    "async_diloco": (AsyncDiLoCoStrategy, {"fragments": None}),
    "async_diloco of fragments": (AsyncDiLoCoStrategy, {"fragments": 2}),
    "async_diloco by default": (AsyncDiLoCoStrategy, {}),
    "streaming_diloco": (StreamingDiLoCoStrategy, {"fragments": 2, "delay": 1}),
    "gasloc": (GASLoCStrategy, {}),
    "noloco": (NoLoCoStrategy, {}),
}


ALL_METHODS = [name for name in REGISTERED if name != "remote_optimizer"]
"""Registered names of the methods in which every worker has an optimizer."""

BY_TIME = ("async_model_average", "pairwise_gossip", "decoupled_diloco")
"""Methods of which no two runs are equal."""


def strategy_of(method: str | Case, sync_every: int = 3, **arguments: Any) -> Any:
    """Return the strategy of a row of ``CASES``, a method of the registry, or ``"ddp"``."""
    if method == "ddp":
        return DDPStrategy()
    if method == "pairwise_gossip":
        return gossip(**{"timeout_s": 30, **arguments})
    if method == "decoupled_diloco":
        return DecoupledDiLoCoStrategy(sync_every, 3, **{"timeout_s": 30, **arguments})
    if method == "remote_optimizer":
        return remote(**{"timeout_s": 30, **arguments})
    case = CASES[method] if isinstance(method, str) else method
    return case.strategy(sync_every, **{"timeout_s": 30, **arguments})


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        method: Class of the method, or its name in ``METHODS``.
        arguments: Further arguments of the method, besides ``sync_every=3`` and ``METHODS``.
        trainer: Arguments of the Trainer.
        module: Makes the module.
        callbacks: Makes the callbacks.
        steps: Batches of an epoch; a tuple if the workers have different numbers.
        validates: Whether to validate, on three batches.
        parts: Parts of a worker's rows; another rank may read each of them.

    """

    method: str | Callable[..., LocoStrategy] = DiLoCoStrategy
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: Callable[[], TinyModule] = ShardedModule
    callbacks: Callable[[], list[Callback]] = list
    steps: int | tuple[int, ...] = 12
    validates: bool = False
    parts: int = 2

    def strategy(self, sizes: Sizes) -> Any:
        kind, own = METHODS[self.method] if isinstance(self.method, str) else (self.method, {})
        return Family(kind, sizes).strategy(**{"sync_every": 3, **own, **self.arguments})

    def compare(
        self, pool: Pool, layout: str, tolerance: float = TOLERANCE
    ) -> list[dict[str, Any]]:
        """Train with workers of one rank and of several; check that the results are equal.

        Returns the results of workers of several ranks.
        """
        sizes = LAYOUTS[layout]
        data, tensor = as_pair(sizes)
        size, run = data * tensor, self if data == 1 else dataclasses.replace(self, parts=data)
        expected = pool.run(fit, run, None, world=pool.size // size)
        found = pool.run(fit, run, sizes, world=pool.size // size * size)
        for rank, result in enumerate(found):
            of_one, first = expected[rank // size], found[rank // size * size]
            assert torch.equal(result["params"], first["params"])
            for name in ("params", "buffers"):
                torch.testing.assert_close(result[name], of_one[name], rtol=0, atol=tolerance)
            assert result["metrics"].keys() == of_one["metrics"].keys()
            for name, value in result["metrics"].items():
                assert abs(value - of_one["metrics"][name]) < 10 * tolerance, name
            for name in ("steps", "epochs"):
                assert result[name] == of_one[name]
        return found


def size_of(sizes: Sizes) -> int:
    """Return the number of ranks of a worker."""
    return math.prod(as_pair(sizes))


def as_pair(sizes: Sizes) -> tuple[int, int]:
    """Return the numbers of a worker's ranks that read different data, and that read the same."""
    return sizes if isinstance(sizes, tuple) else (sizes or 1, 1)


def fit(rank: int, world: int, run: Run, sizes: Sizes) -> dict[str, Any]:
    """Train the given run."""
    strategy = run.strategy(sizes)
    trainer = make_trainer(
        strategy,
        **{
            "max_epochs": 1,
            "use_distributed_sampler": False,
            "limit_val_batches": None if run.validates else 0,
            **run.trainer,
        },
        callbacks=run.callbacks(),
    )
    module = run.module()
    train, validation = loaders(rank, run, sizes)
    trainer.fit(module, train, validation if isinstance(module, ValidatedModule) else None)
    return results(trainer, module)


def loader(rank: int, sizes: Sizes, steps: int = 12, parts: int = 2) -> DataLoader[Any]:
    """Return a rank's loader; it has all rows unless ranks of its worker read different data."""
    data, tensor = as_pair(sizes)
    worker, place = divmod(rank, data * tensor)
    read = list(range(parts)) if data == 1 else [place // tensor]
    return DataLoader(Batches(worker, read, steps), batch_size=None)


def loaders(rank: int, run: Run, sizes: Sizes) -> list[DataLoader[Any]]:
    """Return the loaders of a rank for training and validation."""
    data, tensor = as_pair(sizes)
    steps = run.steps if isinstance(run.steps, int) else run.steps[rank // (data * tensor)]
    other = rank + 7 * data * tensor  # data of another worker
    return [loader(rank, sizes, steps, run.parts), loader(other, sizes, 3, run.parts)]


def results(trainer: Any, module: TinyModule) -> dict[str, Any]:
    strategy = trainer.strategy
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "params": whole(module),
        "buffers": [as_whole(buffer).clone() for buffer in module.buffers()],
        "metrics": metrics,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "bytes": strategy.statistics.bytes_sent,
        "rounds": strategy.statistics.rounds,
        "losses": module.losses,
        "seen": getattr(module, "seen", None),
    }


def whole(module: nn.Module) -> Tensor:
    """Return all parameters in one vector; all ranks of the worker must call it."""
    return torch.cat([as_whole(p).detach().reshape(-1) for p in module.parameters()])


def as_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------- a remote optimizer


class PortEnvironment(PoolEnvironment):
    """An environment of ranks that connect through a port, without a default group.

    Args:
        rank: This rank.
        world: Number of ranks.
        port: A free port.
        num_nodes: Number of nodes to report.
    """

    def __init__(self, rank: int, world: int, port: int, num_nodes: int = 1) -> None:
        super().__init__(num_nodes)
        self._rank = rank
        self._world = world
        self._port = port

    @property
    def main_port(self) -> int:
        return self._port

    def world_size(self) -> int:
        return self._world

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank % (self._world // self.num_nodes)

    def node_rank(self) -> int:
        return self._rank // (self._world // self.num_nodes)

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._rank

    def set_world_size(self, size: int) -> None:
        assert size == self._world


def take_group_away() -> None:
    """Destroy the pool's process group once all ranks are connected.

    The ranks wait in the store, because destroying the group earlier would stop those that
    still connect.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world)])
    dist.destroy_process_group()


@contextmanager
def all_ranks(num_nodes: int = 1) -> Iterator[PortEnvironment]:
    """Replace the pool's process group by an environment; destroy the groups created there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("port", str(free_ports()[0]))
    take_group_away()
    port = int(store.get("port"))
    try:
        yield PortEnvironment(rank, world, port, num_nodes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def remote_trainer(
    environment: PortEnvironment, strategy: RemoteOptimizerStrategy, **settings: Any
) -> Trainer:
    """Return a quiet trainer on all ranks of the pool's call."""
    settings = {"devices": environment.world_size(), "plugins": [environment], **settings}
    return make_trainer(strategy, **settings)


def fit_with(
    strategy: Strategy,
    module: LightningModule,
    *data: Any,
    ckpt_path: str | None = None,
    plugins: Sequence[Any] = (),
    **settings: Any,
) -> Trainer:
    """Fit one epoch (by default) with a remote optimizer, or another strategy to compare with."""
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **settings}
    if not isinstance(strategy, RemoteOptimizerStrategy):
        trainer = make_trainer(strategy, plugins=[PoolEnvironment(), *plugins], **settings)
        trainer.fit(module, *data, ckpt_path=ckpt_path)
        return trainer
    with all_ranks() as environment:
        settings["plugins"] = [environment, *plugins]
        trainer = remote_trainer(environment, strategy, **settings)
        trainer.fit(module, *data, ckpt_path=ckpt_path)
        return trainer


def fit_part(
    strategy: Strategy, module: LightningModule, part: str, folder: str, loader: Any
) -> None:
    """Train 2 epochs: the whole run, its first part up to a checkpoint, or the second part."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if part == "first" and trainer.global_step == 5:
                trainer.save_checkpoint(f"{folder}/cut.ckpt")
                trainer.should_stop = True

    path = f"{folder}/cut.ckpt" if part == "second" else None
    fit_with(strategy, module, loader, ckpt_path=path, max_epochs=2, callbacks=[Save()])


class Seen(Callback):
    """Records the parameters that are validated, and saves a checkpoint after the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.validated: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(flat(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def saved_weights(path: str | Path) -> Tensor:
    """Return the weights in a checkpoint in one vector."""
    state = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([value.reshape(-1) for value in state.values()])


def remote_or_ddp(num_workers: int | None, **options: Any) -> Strategy:
    """Return a remote optimizer with this number of workers, or DDP for None."""
    if num_workers is None:
        return DDPStrategy(**options)
    return RemoteOptimizerStrategy(num_workers, **{"timeout_s": 20, **options})
