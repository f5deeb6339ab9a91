"""Runs of workers of several ranks, and the same runs with workers of one rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
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
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    NoLoCoStrategy,
    StreamingDiLoCoStrategy,
)
from tests.harness.forked_jobs import Job, Outcome
from tests.harness.limits import HARNESS_S
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import FEATURES, TinyModule, ValidatedModule, worker_batch

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
    """The batches of a worker, whose rows have parts: those of some parts."""

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
    """A small model, with what a user writes in ``configure_model``.

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
        if mesh["data_parallel"].size() > 1 or mesh.size() == 1:  # Lightning wants a DTensor
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
    """With rows and columns that tensor parallelism splits, and rows of the batch in LayerNorm.

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


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained and how.

    Args:
        method: Class of the method, or its name in ``METHODS``.
        arguments: Of the method, in addition to ``sync_every=3`` and those in ``METHODS``.
        trainer: Arguments of the Trainer.
        module: Makes the module.
        callbacks: Makes the callbacks.
        steps: Batches of an epoch; a tuple if the workers have different numbers.
        validates: Whether to validate, on three batches.
        parts: Parts of a worker's rows, each of which another rank may read.

    """

    method: str | Callable[..., LocoStrategy] = DiLoCoStrategy
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: Callable[[], TinyModule] = ShardedModule
    callbacks: Callable[[], list[Callback]] = list
    steps: int | tuple[int, ...] = 12
    validates: bool = False
    parts: int = 2

    def strategy(self, sizes: Sizes) -> LocoStrategy | LocoModelParallelStrategy:
        kind, own = METHODS[self.method] if isinstance(self.method, str) else (self.method, {})
        replica_size = sizes if isinstance(sizes, int) else 1
        method = kind(**{"sync_every": 3, "replica_size": replica_size, **own, **self.arguments})
        return LocoModelParallelStrategy(method, *sizes) if isinstance(sizes, tuple) else method

    def compare(
        self, pool: Pool, layout: str, tolerance: float = TOLERANCE
    ) -> list[dict[str, Any]]:
        """Train with workers of one rank and of several, check that all is equal.

        Returns the results of the latter.
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


def as_pair(sizes: Sizes) -> tuple[int, int]:
    """Ranks of a worker that read other data, and ranks that read the same."""
    return sizes if isinstance(sizes, tuple) else (sizes or 1, 1)


def fit(rank: int, world: int, run: Run, sizes: Sizes) -> dict[str, Any]:
    """Train as ``run`` says."""
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
    """What a rank reads; if no other rank of its worker reads other data, all rows of it."""
    data, tensor = as_pair(sizes)
    worker, place = divmod(rank, data * tensor)
    read = list(range(parts)) if data == 1 else [place // tensor]
    return DataLoader(Batches(worker, read, steps), batch_size=None)


def loaders(rank: int, run: Run, sizes: Sizes) -> list[DataLoader[Any]]:
    """What a rank reads to train and to validate."""
    data, tensor = as_pair(sizes)
    steps = run.steps if isinstance(run.steps, int) else run.steps[rank // (data * tensor)]
    other = rank + 7 * data * tensor  # of another worker
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
    """All parameters in one vector; all ranks of the worker must call it."""
    return torch.cat([as_whole(p).detach().reshape(-1) for p in module.parameters()])


def as_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_fault(
    train: Callable[..., None], *args: Any, kind: str, victim: int, timeout_s: float
) -> list[Outcome]:
    """Let one rank of two workers of two fail, and check that all others name it.

    Args:
        train: Called as ``train(rank, world, *args)`` on four ranks.
        *args: What else it is called with.
        kind: How the rank fails, in ``KINDS``.
        victim: The rank.
        timeout_s: Of the default process group.
    """
    others = [rank for rank in range(4) if rank != victim]
    with Job(train, *args, world=4, group_timeout_s=timeout_s) as job:
        outcomes = job.outcomes(others, HARNESS_S)
    name = rf"[Ww]orker {victim // 2}, place {victim % 2} \(rank {victim}\)"
    what = " failed:(.|\n)*LookupError: trouble" if kind == "raises" else ""
    for rank, outcome in zip(others, outcomes, strict=True):
        assert outcome.error is not None
        last = outcome.error[outcome.error.rindex("WorkerFailure: ") :]
        assert re.search(name + what, last), f"rank {rank}: {outcome.error}"
    return outcomes
