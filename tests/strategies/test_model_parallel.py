"""Workers whose ranks shard the model: FSDP2, tensor parallelism, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    NoLoCoStrategy,
    StreamingDiLoCoStrategy,
)
from tests.pool import Pool, make_trainer
from tests.small_model import FEATURES, TinyModule, worker_batch

SIZE = 2  # ranks of a worker
STEPS = 12
TOLERANCE = 1e-11
HIDDEN = 6


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
    """The small model, with what a user writes in ``configure_model``."""

    def __init__(self, bias: bool = True, optimizer: str = "SGD", clip_only: bool = False) -> None:
        super().__init__(optimizer=optimizer)
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 1)
        ).double()

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None:
            return
        if mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(output_layouts=_replicated())}
            parallelize_module(self.model, mesh["tensor_parallel"], plan)
        else:  # a checkpoint of Lightning needs a DTensor, even on one rank
            fully_shard(self.model[0], mesh=mesh["data_parallel"])
            fully_shard(self.model, mesh=mesh["data_parallel"])


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def whole(module: nn.Module) -> Tensor:
    """All parameters in one vector; all ranks of the worker must call it."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in found])


METHODS: dict[str, Any] = {
    "local_sgd": (LocalSGDStrategy, {}),
    "diloco": (DiLoCoStrategy, {"outer_momentum": 0.5}),
    "async_diloco": (AsyncDiLoCoStrategy, {"fragments": None}),
    "async_diloco of fragments": (AsyncDiLoCoStrategy, {"fragments": 2}),
    "streaming_diloco": (StreamingDiLoCoStrategy, {"fragments": 2, "delay": 1}),
    "gasloc": (GASLoCStrategy, {}),
    "noloco": (NoLoCoStrategy, {}),
}


def fit(
    rank: int,
    world: int,
    method: str,
    sizes: tuple[int, int] | None,
    arguments: dict[str, Any],
    trainer_arguments: dict[str, Any],
) -> dict[str, Any]:
    kind, own = METHODS[method]
    made = kind(**{"sync_every": 3, **own, **arguments})
    data, tensor = sizes or (1, 1)
    strategy = made if sizes is None else LocoModelParallelStrategy(made, data, tensor)
    worker, place = divmod(rank, data * tensor)
    parts = list(range(SIZE)) if data == 1 else [place // tensor]
    defaults: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    trainer = make_trainer(strategy, **defaults, **trainer_arguments)
    module = ShardedModule()
    trainer.fit(module, DataLoader(Batches(worker, parts, STEPS), batch_size=None))
    return {
        "params": whole(module),
        "sharded": isinstance(strategy, ModelParallelStrategy),
        "kinds": {type(p).__name__ for p in module.parameters()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


LAYOUTS = {"fsdp": (2, 1), "tensor": (1, 2)}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("method", list(METHODS))
def test_shards_train_as_whole_models_do(pool: Pool, method: str, layout: str) -> None:
    expected = pool.run(fit, method, None, {}, {}, world=2)
    found = pool.run(fit, method, LAYOUTS[layout], {}, {}, world=4)
    for rank, result in enumerate(found):
        of_one = expected[rank // SIZE]
        torch.testing.assert_close(result["params"], of_one["params"], rtol=0, atol=TOLERANCE)
