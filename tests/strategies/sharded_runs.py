"""Runs of workers whose ranks shard the model, and the same runs with whole models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from lightning_loco import DiLoCoStrategy, LocoModelParallelStrategy
from lightning_loco.strategies import LocoStrategy
from tests.pool import Pool, make_trainer
from tests.small_model import FEATURES, TinyModule, loss_of, worker_batch

SIZE = 2  # ranks of a worker that read other data, if any do
TOLERANCE = 1e-11
LAYOUTS = {"fsdp": (2, 1), "tensor": (1, 2), "both": (2, 2)}
"""``data_parallel_size`` and ``tensor_parallel_size``; in a pool of four ``both`` is one worker."""


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a worker: the rows of all ranks that read other data, or those of one."""

    def __init__(self, worker: int, parts: list[int], num_steps: int) -> None:
        self.worker = worker
        self.parts = parts
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        found = [worker_batch(SIZE * self.worker + part, step) for part in self.parts]
        inputs, targets = zip(*found, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class ShardedModule(TinyModule):
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

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)


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


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained and how.

    Args:
        method: Class of the method.
        arguments: Of the method, in addition to ``sync_every=3``.
        trainer: Arguments of the Trainer.
        module: Makes the module.
        callbacks: Makes the callbacks.
        steps: Batches of an epoch; a tuple if the workers have different numbers.
        validates: Whether to validate, on three batches.

    """

    method: Callable[..., LocoStrategy] = DiLoCoStrategy
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: Callable[[], ShardedModule] = ShardedModule
    callbacks: Callable[[], list[Callback]] = list
    steps: int | tuple[int, ...] = 12
    validates: bool = False

    def strategy(self, sizes: tuple[int, int] | None) -> LocoStrategy | LocoModelParallelStrategy:
        method = self.method(**{"sync_every": 3, **self.arguments})
        return method if sizes is None else LocoModelParallelStrategy(method, *sizes)

    def compare(
        self, pool: Pool, layout: str, tolerance: float = TOLERANCE
    ) -> list[dict[str, Any]]:
        """Train with whole models and with shards, check that all is equal; return the latter."""
        size = LAYOUTS[layout][0] * LAYOUTS[layout][1]
        expected = pool.run(fit, self, None, world=4 // size)
        found = pool.run(fit, self, LAYOUTS[layout])
        for rank, result in enumerate(found):
            of_one = expected[rank // size]
            for name in ("params", "buffers"):
                torch.testing.assert_close(result[name], of_one[name], rtol=0, atol=tolerance)
            assert result["metrics"].keys() == of_one["metrics"].keys()
            for name, value in result["metrics"].items():
                assert abs(value - of_one["metrics"][name]) < 10 * tolerance, name
            assert result["steps"] == of_one["steps"]
        return found


def fit(rank: int, world: int, run: Run, sizes: tuple[int, int] | None) -> dict[str, Any]:
    """Train as ``run`` says, with whole models if ``sizes`` is None."""
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
    trainer.fit(module, train, validation)
    return results(trainer, module)


def loaders(rank: int, run: Run, sizes: tuple[int, int] | None) -> list[DataLoader[Any]]:
    data, tensor = sizes or (1, 1)
    worker, place = divmod(rank, data * tensor)
    parts = list(range(SIZE)) if data == 1 else [place // tensor]
    steps = run.steps if isinstance(run.steps, int) else run.steps[worker]
    train = DataLoader(Batches(worker, parts, steps), batch_size=None)
    validation = DataLoader(Batches(worker + 7, parts, 3), batch_size=None)
    return [train, validation]


def results(trainer: Any, module: TinyModule) -> dict[str, Any]:
    strategy = trainer.strategy
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "params": whole(module),
        "buffers": [as_whole(buffer).clone() for buffer in module.buffers()],
        "metrics": metrics,
        "steps": trainer.global_step,
        "bytes": strategy.statistics.bytes_sent,
        "rounds": strategy.statistics.rounds,
        "losses": module.losses,
        "seen": module.seen,
    }


def whole(module: nn.Module) -> Tensor:
    """All parameters in one vector; all ranks of the worker must call it."""
    return torch.cat([as_whole(p).detach().reshape(-1) for p in module.parameters()])


def as_whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
