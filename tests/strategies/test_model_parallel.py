"""Workers whose ranks shard the model by FSDP2, tensor parallelism or both train as whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_loco import (
    AsyncDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    NoLoCoStrategy,
    StreamingDiLoCoStrategy,
)
from tests.pool import Pool
from tests.small_model import FEATURES, loss_of
from tests.strategies.sharded_runs import (
    LAYOUTS,
    Run,
    SequenceModule,
    ShardedModule,
)

# Of a layer that is sharded by both: PyTorch warns of in-place operations, and there are none.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

METHODS: dict[str, Run] = {
    "local_sgd": Run(LocalSGDStrategy),
    "diloco": Run(arguments={"outer_momentum": 0.5}),
    "async_diloco": Run(AsyncDiLoCoStrategy, {"fragments": None}),
    "async_diloco of fragments": Run(AsyncDiLoCoStrategy, {"fragments": 2}),
    "async_diloco by default": Run(AsyncDiLoCoStrategy),
    "streaming_diloco": Run(StreamingDiLoCoStrategy, {"fragments": 2, "delay": 1}),
    "gasloc": Run(GASLoCStrategy),
    "noloco": Run(NoLoCoStrategy),
}


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
@pytest.mark.parametrize("method", list(METHODS))
def test_shards_train_as_whole_models_do(pool: Pool, method: str, layout: str) -> None:
    METHODS[method].compare(pool, layout)


# -------------------------------------------------------------------------- training


def adam() -> ShardedModule:
    return ShardedModule("Adam")


class Manual(ShardedModule):
    """Two optimizers, stepped by hand, with clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = [m for m in self.model if list(m.parameters())]
        rest = [p for module in others for p in module.parameters()]
        return [torch.optim.SGD(first.parameters(), lr=0.05), torch.optim.Adam(rest, lr=0.01)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = loss_of(self.model, batch)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()


class Scheduled(ShardedModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


TRAINING: dict[str, Run] = {
    "clipping by norm": Run(trainer={"gradient_clip_val": 0.5}),
    "clipping by value": Run(
        trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    ),
    "clipping of partial sums by norm": Run(
        module=SequenceModule, trainer={"gradient_clip_val": 0.5}
    ),
    "clipping of partial sums by value": Run(
        module=SequenceModule,
        trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "accumulation": Run(
        arguments={"sync_every": 2},
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        steps=18,
    ),
    "optimizers by hand": Run(module=Manual),
    "adam": Run(module=adam),
    "a scheduler": Run(module=Scheduled),
    "buckets in turn": Run(arguments={"bucket_bytes": 64}),
    "messages in the host's memory": Run(arguments={"outer_device": "cpu"}),
    "each worker's own parameters": Run(arguments={"finalize": "keep"}),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(TRAINING))
def test_training(pool: Pool, name: str, layout: str) -> None:
    TRAINING[name].compare(pool, layout)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_workers_with_different_numbers_of_batches(pool: Pool, layout: str) -> None:
    Run(steps=(13, 7), validates=True).compare(pool, layout)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_a_list_of_sync_every(pool: Pool, layout: str) -> None:
    Run(arguments={"sync_every": [4, 2]}, steps=(16, 8)).compare(pool, layout)


class CollectsInStep(ShardedModule):
    """Waits for all ranks within a step, while the second worker makes two more rounds."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 + 4 * strategy.worker:
            rounds = strategy.statistics.rounds
            strategy.barrier("in the step")
            self.seen.append(strategy.statistics.rounds - rounds)
        return loss


class CollectsByHand(CollectsInStep):
    """The same, in a step after which FSDP2 keeps whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.model, batch))
        optimizer.step()
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
@pytest.mark.parametrize("module", [CollectsInStep, CollectsByHand])
def test_rounds_within_a_step(pool: Pool, module: type[ShardedModule], layout: str) -> None:
    arguments = {"sync_every": 2, "outer_momentum": 0.5}
    run = Run(arguments=arguments, trainer={"max_steps": 10}, module=module)
    assert [one["seen"] for one in run.compare(pool, layout)] == [[2], [2], [0], [0]]


# ------------------------------------------------------------------------ the model


class Uneven(ShardedModule):
    hidden = 13


class Frozen(ShardedModule):
    def __init__(self) -> None:
        super().__init__()
        self.model[0].weight.requires_grad_(False)


class Tied(ShardedModule):
    def build(self) -> nn.Module:
        found = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
        found[3].weight = found[2].weight
        return found.append(nn.Linear(6, 1))


class OneOptimized(ShardedModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(self.model[0].parameters()), lr=0.05)


class Checkpointed(ShardedModule):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = checkpoint(self.model, inputs, use_reentrant=False)
        return (outputs.squeeze(-1) - targets).square().mean()


class CheckpointedLayers(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        apply_activation_checkpointing(self.model, check_fn=lambda m: isinstance(m, nn.Linear))
        fully_shard(self.model, mesh=mesh)


class Compiled(ShardedModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.model[0].compile(backend="eager")


class Gathered(ShardedModule):
    """No module drops the whole parameters after its forward pass."""

    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)


class ByColumns(ShardedModule):
    """Shards of matrices are columns."""

    def shard(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Shard

        def columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None

        fully_shard(self.model, mesh=mesh, shard_placement_fn=columns)


MODELS: dict[str, tuple[Run, list[str]]] = {
    "shards of different size": (Run(module=Uneven), ["fsdp"]),
    "frozen parameters": (Run(module=Frozen), ["fsdp", "tensor", "both"]),
    "tied parameters": (Run(module=Tied, trainer={"gradient_clip_val": 1.0}), ["fsdp", "both"]),
    "parameters that no optimizer has": (Run(module=OneOptimized), ["fsdp", "tensor"]),
    "a checkpoint in the step": (Run(module=Checkpointed), ["fsdp", "both"]),
    "checkpointed layers": (Run(module=CheckpointedLayers), ["fsdp"]),
    "a compiled layer": (Run(module=Compiled), ["fsdp"]),
    "parameters that stay gathered": (Run(module=Gathered, validates=True), ["fsdp", "both"]),
    "shards of columns": (
        Run(AsyncDiLoCoStrategy, {"fragments": 3}, module=ByColumns),
        ["fsdp", "both"],
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in MODELS for layout in MODELS[name][1]]
)
def test_models(pool: Pool, name: str, layout: str) -> None:
    MODELS[name][0].compare(pool, layout)
