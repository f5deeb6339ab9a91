"""Workers of several ranks train like workers of one: DDP, FSDP2, tensor parallelism or both."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
)
from lightning_loco.callbacks import CommunicationMonitor, StragglerSimulator, WorkerLogs
from lightning_loco.compression import ErrorFeedback, Int8
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import (
    FEATURES,
    TinyModule,
    ValidatedModule,
    flat,
    loss_of,
    make_model,
    worker_batch,
)
from tests.strategies.families import (
    LAYOUTS,
    METHODS,
    SHARDED,
    TOLERANCE,
    Batches,
    Family,
    HybridModule,
    Run,
    SequenceModule,
    ShardedModule,
    as_pair,
    fit,
    loader,
    loaders,
    whole,
)

SIZE = 2  # ranks of a worker

# From a layer that both shard: PyTorch warns about in-place operations, but there are none.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.mark.parametrize(
    ("method", "layout", "finalize"),
    [
        *cover(METHODS, ["ddp"], ["keep"]),
        *cover(METHODS, ["fsdp", "tensor"], ["average"], strength=1),
    ],
)
def test_ranks_train_as_one_worker_that_reads_all_their_rows(
    pool: Pool, method: str, layout: str, finalize: str
) -> None:
    results = Run(method, {"finalize": finalize}, {"max_steps": 11}).compare(pool, layout)
    assert (results[0]["params"] - flat(ShardedModule())).abs().max() > 1e-2
    difference = (results[0]["params"] - results[SIZE]["params"]).abs().max()
    assert difference > 1e-4 if finalize == "keep" else difference == 0


# -------------------------------------------------------------------------- training


def one_of(named: tuple[str, Any]) -> Any:
    """Return a row of a table as a parameter with the row's name as id."""
    return pytest.param(named[1], id=named[0])


def adam() -> ShardedModule:
    return ShardedModule("Adam")


class Manual(ShardedModule):
    """Two optimizers, stepped by hand after every second batch, with clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = [m for m in self.model if list(m.parameters())]
        rest = [p for module in others for p in module.parameters()]
        return [torch.optim.SGD(first.parameters(), lr=0.05), torch.optim.Adam(rest, lr=0.01)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(loss_of(self.model, batch) / 2)
        if batch_idx % 2:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()


class Scheduled(ShardedModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


CLIPPING: dict[str, Run] = {
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
}
TRAINING: dict[str, Run] = {
    "accumulation": Run(
        arguments={"sync_every": 2},
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        steps=18,
    ),
    "optimizers by hand": Run(arguments={"sync_every": 6}, module=Manual, steps=18),
    "adam": Run(module=adam),
    "a scheduler": Run(module=Scheduled),
    "buckets in turn": Run(arguments={"bucket_bytes": 64}),
    "messages in the host's memory": Run(arguments={"outer_device": "cpu"}),
    "each worker's own parameters": Run(arguments={"finalize": "keep"}),
}


class SometimesUnused(TinyModule):
    """A layer that is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 1).double()
        nn.init.constant_(self.extra.weight, 0.1)
        nn.init.zeros_(self.extra.bias)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        if batch_idx % 2:
            loss = loss + self.extra(batch[0]).square().mean()
        return loss


class Synchronized(TinyModule):
    """Records after which backward passes DDP has averaged the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_after_backward(self) -> None:
        model = self.trainer.model
        if isinstance(model, DistributedDataParallel):
            assert model.module is self
            self.seen.append(bool(model.require_backward_grad_sync))


class OwnWeights(TinyModule):
    """Starts with different weights on each rank; a hook then writes weights on the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(seed=dist.get_rank())

    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.model[0].weight.fill_(0.25)


def averaging() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


OF_DDP: dict[str, Run] = {
    "clipping": CLIPPING["clipping by norm"],
    "optimizers by hand": TRAINING["optimizers by hand"],
    "accumulation": Run(trainer={"accumulate_grad_batches": 2}, module=Synchronized),
    "unused parameters, gradients as views": Run(
        arguments={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        module=SometimesUnused,
    ),
    "a static graph": Run(arguments={"static_graph": True}),
    "averaged weights": Run(trainer={"max_epochs": 3}, callbacks=averaging),
    "other weights on each rank": Run(trainer={"max_steps": 7}, module=OwnWeights),
}


@pytest.mark.parametrize("name", OF_DDP)
def test_training_with_ddp(pool: Pool, name: str) -> None:
    results = OF_DDP[name].compare(pool, "ddp")
    if name == "accumulation":  # gradients are averaged once in a local step
        assert {str(one["seen"]) for one in results} == {str([False, True] * 6)}


def test_unused_parameters_need_the_argument(pool: Pool) -> None:
    run = Run(arguments={"timeout_s": 20}, module=SometimesUnused)
    with pytest.raises(PoolError, match="find_unused_parameters=True") as error:
        pool.run(fit, run, SIZE, grace_s=30)
    assert sorted(error.value.failures) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        *cover(map(one_of, CLIPPING.items()), SHARDED),
        *cover(map(one_of, TRAINING.items()), ["fsdp", "tensor"], strength=1),
    ],
)
def test_training(pool: Pool, run: Run, layout: str) -> None:
    run.compare(pool, layout)


@pytest.mark.parametrize(
    ("method", "layout", "steps"),
    [
        *cover(["diloco", "gasloc", "async_diloco of fragments"], ["ddp"], [(7, 12)]),
        *cover(["diloco"], ["fsdp", "tensor"], [(13, 7)]),
    ],
)
def test_workers_with_different_numbers_of_batches(
    pool: Pool, method: str, layout: str, steps: tuple[int, int]
) -> None:
    run = Run(method, trainer={"max_epochs": 2}, steps=steps, validates=True)
    run.compare(pool, layout)


@pytest.mark.parametrize(
    ("method", "layout"), [("gasloc", "ddp"), ("diloco", "fsdp"), ("diloco", "tensor")]
)
def test_a_list_of_sync_every(pool: Pool, method: str, layout: str) -> None:
    Run(method, {"sync_every": [4, 2]}, steps=(16, 8)).compare(pool, layout)


class CollectsInStep(ShardedModule):
    """Waits for all ranks within a step, while the second worker runs two more rounds."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 + 4 * strategy.worker:
            rounds = strategy.statistics.rounds
            strategy.barrier("in the step")
            self.seen.append(strategy.statistics.rounds - rounds)
        return loss


class CollectsByHand(CollectsInStep):
    """The same, in a step after which FSDP2 keeps unsharded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.model, batch))
        optimizer.step()
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (CollectsInStep, "ddp"),
        *cover([CollectsInStep, CollectsByHand], ["fsdp", "tensor"], strength=1),
    ],
)
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
    """No module reshards its parameters after its forward pass."""

    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)


class ByColumns(ShardedModule):
    """Matrices are sharded by columns."""

    def shard(self, mesh: DeviceMesh) -> None:
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
    "copies of shards": (
        Run(module=HybridModule, trainer={"gradient_clip_val": 0.5}, validates=True),
        ["fsdp", "fsdp of 4"],
    ),
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


# ------------------------------------------------------------------------ validation


def early_stopping() -> list[Callback]:
    return [EarlyStopping("val_loss", patience=1, min_delta=0.5)]


VALIDATED: dict[str, Run] = {
    "the mean of the workers": Run(trainer={"val_check_interval": 4}),
    "outer parameters": Run(arguments={"evaluate": "outer"}, trainer={"val_check_interval": 4}),
    "each worker's own": Run(arguments={"evaluate": "local"}, trainer={"val_check_interval": 4}),
    "of fragments": Run(
        AsyncDiLoCoStrategy, {"fragments": 2}, trainer={"val_check_interval": 5}, steps=20
    ),
    "in every second epoch": Run(
        trainer={"check_val_every_n_epoch": 2, "max_epochs": 3, "limit_val_batches": 2}
    ),
    "early stopping": Run(
        trainer={"val_check_interval": 4, "max_epochs": 5}, callbacks=early_stopping
    ),
}


LIMITS: list[dict[str, Any]] = [
    {"max_steps": 15, "max_epochs": -1},
    {"limit_train_batches": 5, "max_epochs": 2},
    {"fast_dev_run": True},
    {"max_time": "00:01:00:00"},
    {"overfit_batches": 2, "max_epochs": 2},
]


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        *cover(map(one_of, VALIDATED.items()), ["fsdp", "tensor"], strength=1),
        *((VALIDATED[name], "ddp") for name in ("the mean of the workers", "early stopping")),
        *((Run(trainer=limits, callbacks=early_stopping), "ddp") for limits in LIMITS),
    ],
)
def test_validations_do_not_change_the_training(pool: Pool, run: Run, layout: str) -> None:
    results = dataclasses.replace(run, validates=True).compare(pool, layout)
    assert all(math.isfinite(one["metrics"]["val_loss"]) for one in results)
    if run is VALIDATED["early stopping"]:
        assert results[0]["epochs"] < run.trainer["max_epochs"]


def fit_and_save(rank: int, world: int, layout: str, folder: str) -> tuple[float, str]:
    """Save the best validation, for which FSDP2's parameters were gathered."""
    saving = ModelCheckpoint(folder, monitor="val_loss")
    sizes = SHARDED[layout]
    run = Run(module=adam, validates=True)
    method = run.strategy(None)
    strategy = LocoModelParallelStrategy(method, *sizes, save_distributed_checkpoint=False)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": False}
    trainer = make_trainer(
        strategy, max_epochs=2, val_check_interval=4, callbacks=[saving], **settings
    )
    module = run.module()
    trainer.fit(module, *loaders(rank, run, sizes))
    assert saving.best_model_score is not None
    return float(saving.best_model_score), saving.best_model_path


@pytest.mark.recovery
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_a_validated_model_is_saved(pool: Pool, layout: str, tmp_path: Path) -> None:
    for score, path in pool.run(fit_and_save, layout, str(tmp_path)):
        saved = torch.load(path, weights_only=True)
        module = adam()
        module.load_state_dict(saved["state_dict"])
        losses = [
            loss_of(module.model, batch).item()
            for worker in (7, 8)
            for batch in map(Batches(worker, [0, 1], 3).__getitem__, range(3))
        ]
        assert score == pytest.approx(sum(losses) / len(losses), rel=0, abs=TOLERANCE)


class Predicting(ShardedModule):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])


def evaluate(rank: int, world: int, sizes: tuple[int, int] | None, fits: int) -> list[Any]:
    """Evaluate after each of some fits, or without a fit."""
    run = Run(trainer={"num_sanity_val_steps": 0}, validates=True)
    settings: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = make_trainer(run.strategy(sizes), max_epochs=1, **settings)
    module, (train, validation) = Predicting(), loaders(rank, run, sizes)
    found: list[Any] = []
    for epochs in range(1, fits + 1) or (0,):
        if epochs:
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, train, validation)
        (validated,) = trainer.validate(module, validation, verbose=False)
        (tested,) = trainer.test(module, validation, verbose=False)
        predicted: Any = trainer.predict(module, validation)
        mean = trainer.strategy.reduce(torch.cat(predicted).mean())
        found += [validated["val_loss"], tested["test_loss"], float(mean)]
        found.append(whole(module).tolist())
    return found


@pytest.mark.parametrize(
    ("fits", "layout"), [(2, "ddp"), *cover([0, 2], ["fsdp", "tensor"], strength=1)]
)
def test_evaluations_after_fits_and_without_one(pool: Pool, fits: int, layout: str) -> None:
    expected, *_ = pool.run(evaluate, None, fits, world=2)
    for found in pool.run(evaluate, LAYOUTS[layout], fits):
        for own, other in zip(found, expected, strict=True):
            assert own == pytest.approx(other, rel=0, abs=TOLERANCE)
        assert fits == 0 or found[3] != found[7]  # parameters after each fit


# --------------------------------------------------------- weights, buffers and hooks


class OwnStart(ShardedModule):
    """Starts with different weights and buffers on each rank, as without a seed."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                if tensor.is_floating_point():
                    tensor.add_(0.1 * rank)


class NormModule(ShardedModule):
    """With BatchNorm, and a buffer that differs between ranks."""

    def build(self) -> nn.Module:
        layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)
        return nn.Sequential(*layers)


class OwnNorm(NormModule, OwnStart):
    pass


class SequenceNorm(SequenceModule):
    """With a buffer that each rank changes; tensor parallelism turns it into a ``DTensor``."""

    def build(self) -> nn.Module:
        model = super().build()
        model[3].register_buffer("scale", torch.ones(4))
        return model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scale = self.model[3].scale
        local = scale.to_local() if isinstance(scale, DTensor) else scale
        local.add_(0.5 + self.global_rank)
        return super().training_step(batch, batch_idx)


class Still(OwnNorm):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("layout", list(SHARDED))
def test_ranks_without_a_seed_start_alike(pool: Pool, layout: str) -> None:
    first, *others = pool.run(
        fit, Run(module=Still, arguments={"finalize": "keep", "sync_every": 100}), SHARDED[layout]
    )
    for other in others:
        assert torch.equal(other["params"], first["params"])


@pytest.mark.parametrize(
    ("module", "layout"),
    [(NormModule, "ddp"), *cover([NormModule, OwnNorm, SequenceNorm], SHARDED, strength=1)],
)
def test_all_ranks_end_with_the_same_weights_and_buffers(
    pool: Pool, module: type[ShardedModule], layout: str
) -> None:
    run = Run(module=module, validates=True)
    first, *others = pool.run(fit, run, LAYOUTS[layout])
    assert (first["buffers"][0] != 0).all()
    for other in others:
        assert torch.equal(other["params"], first["params"])
        assert all(map(torch.equal, other["buffers"], first["buffers"]))
        assert other["metrics"] == first["metrics"]


@pytest.mark.parametrize("module", [NormModule, OwnNorm])
def test_statistics_of_batch_norm_are_those_of_whole_models(
    pool: Pool, module: type[ShardedModule]
) -> None:
    if module is NormModule:
        Run(module=module, validates=True).compare(pool, "tensor")
    else:
        found = pool.run(fit, Run(module=module), SHARDED["tensor"])
        assert all(torch.equal(one["params"], found[0]["params"]) for one in found)


class Writes(ShardedModule):
    """Hooks write before the first batch, on the first worker, and between epochs, on all."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.worker == 0:
            self.write("model.0.weight", 0.25)

    def on_train_epoch_end(self) -> None:
        self.write("model.3.bias", 0.5)  # held by one rank of a worker

    def write(self, name: str, value: float) -> None:
        parameter: Tensor = self.get_parameter(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.detach().fill_(value)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_weights_that_hooks_write(pool: Pool, layout: str) -> None:
    arguments = {"outer_momentum": 0.5}
    run = Run(module=Writes, arguments=arguments, trainer={"max_epochs": 3}, steps=7)
    run.compare(pool, layout)


# ------------------------------------------------------------- NaN, codes, the clock


class Broken(ShardedModule):
    """One shard of the second worker gets NaN."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        place = strategy.global_rank % strategy.replica_size
        if batch_idx == 4 and strategy.worker == 1 and place == 0:
            parameter: Tensor = self.get_parameter("model.0.weight")
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach()[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("method", "layout"),
    cover([DiLoCoStrategy, AsyncDiLoCoStrategy, LocalSGDStrategy], ["fsdp", "tensor"], strength=1),
)
def test_nan_in_a_shard_leaves_the_whole_worker_out(pool: Pool, method: Any, layout: str) -> None:
    Run(method, module=Broken).compare(pool, layout)


@pytest.mark.parametrize(
    ("method", "layout"),
    cover([DiLoCoStrategy, AsyncDiLoCoStrategy], ["fsdp", "tensor"], strength=1),
)
def test_compressed_messages(pool: Pool, method: Any, layout: str) -> None:
    """The blocks differ between layouts, so values are rounded differently."""
    run = Run(method, {"compression": ErrorFeedback(Int8(block=8))}, steps=24)
    found = run.compare(pool, layout, tolerance=0.05)
    exact = pool.run(fit, Run(method, steps=24), SHARDED[layout])
    for one, other in zip(found, exact, strict=True):
        assert not torch.equal(one["params"], other["params"])
        assert one["bytes"] < other["bytes"]
    assert torch.equal(found[0]["params"], found[-1]["params"])


def average_by_time(**arguments: Any) -> Any:
    del arguments["sync_every"]
    return AsyncModelAverageStrategy(**arguments)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_warm_up_of_averaging_by_the_clock(pool: Pool, layout: str) -> None:
    arguments = {"interval_s": 1e4, "warmup_steps": 6}
    Run(average_by_time, arguments, {"gradient_clip_val": 0.5}).compare(pool, layout)


@pytest.mark.parametrize(
    ("warmup_steps", "layout"), [(2, "ddp"), *cover([0, 5], ["fsdp", "tensor"], strength=1)]
)
def test_averaging_by_the_clock_keeps_workers_together(
    pool: Pool, warmup_steps: int, layout: str
) -> None:
    arguments = {"interval_s": 0.0, "warmup_steps": warmup_steps}
    # A round lasts as many local steps as its thread needs: 30 steps had two on a busy machine.
    run = Run(average_by_time, arguments, {"max_epochs": 2}, steps=45, validates=True)
    first, *others = pool.run(fit, run, LAYOUTS[layout])
    assert first["rounds"] > 2
    for other in others:
        assert torch.equal(other["params"], first["params"])
        assert other["rounds"] == first["rounds"]


# --------------------------------------------------------------------------- precision


class Narrow(ShardedModule):
    """float32, which FSDP2 casts to bfloat16 for a pass."""

    def build(self) -> nn.Module:
        return super().build().float()

    def __init__(self) -> None:
        super().__init__()
        self.model.float()

    def shard(self, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(self.model[0], mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, targets = batch
        dtype = next(self.model.parameters()).dtype
        return inputs.to(dtype), targets.to(dtype)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)]
)
def test_narrow_numbers(pool: Pool, precision: str, dtype: torch.dtype) -> None:
    run = Run(module=Narrow, trainer={"precision": precision, "gradient_clip_val": 0.5})
    found = pool.run(fit, run, SHARDED["fsdp"])
    for one in found:
        assert one["params"].dtype == dtype
        assert torch.equal(one["params"], found[0]["params"])
    assert found[0]["losses"][-1] < found[0]["losses"][0]


# -------------------------------------------------------------------- sent messages


@pytest.mark.parametrize(("layout", "columns"), [("fsdp", 2), ("tensor", 2), ("both", 4)])
def test_each_element_is_sent_by_one_rank(pool: Pool, layout: str, columns: int) -> None:
    run = Run(LocalSGDStrategy, {"summary": False}, {"num_sanity_val_steps": 0})
    whole_model, *_ = pool.run(fit, run, None, world=2)
    found = pool.run(fit, run, SHARDED[layout])
    if layout == "both":
        assert [one["bytes"] for one in found] == [0] * 4
        return
    num_bytes = 8 * found[0]["params"].numel()
    rounds_and_end = whole_model["rounds"] + 1
    for worker in (found[:2], found[2:]):
        payload = sum(one["bytes"] for one in worker)
        statuses = whole_model["bytes"] - rounds_and_end * num_bytes
        assert payload == rounds_and_end * num_bytes + columns * statuses


class Reading(ShardedModule):
    """Records the samples that this rank trains on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        self.seen += samples.int().tolist()
        return self.model(samples.view(-1, 1).expand(-1, FEATURES)).square().mean()


def read(rank: int, world: int, sync_every: Any, layout: str) -> tuple[list[int], int]:
    strategy = Family(LocalSGDStrategy, LAYOUTS[layout]).strategy(sync_every=sync_every)
    module = Reading()
    data = TensorDataset(torch.arange(48, dtype=torch.float64))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    trainer = make_trainer(strategy, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, loader, loader)
    return module.seen, trainer.global_step


@pytest.mark.parametrize(
    ("layout", "sync_every", "num_samples"),
    [
        ("ddp", 2, [12, 12, 12, 12]),
        ("ddp", [1, 2], [8, 8, 16, 16]),
        ("fsdp", 2, [12, 12, 12, 12]),
        ("fsdp", [1, 2], [8, 8, 16, 16]),
        ("tensor", 2, [24, 24, 24, 24]),
        ("tensor", [1, 2], [16, 16, 32, 32]),
        ("both", 2, [24, 24, 24, 24]),
    ],
    ids=str,
)
def test_ranks_divide_the_data(
    pool: Pool, layout: str, sync_every: Any, num_samples: list[int]
) -> None:
    found, (_, same) = pool.run(read, sync_every, layout), as_pair(LAYOUTS[layout])
    samples = [seen for seen, _ in found]
    for rank, one in enumerate(samples):
        assert one == samples[rank - rank % same]
    assert sorted(sum(samples[::same], [])) == list(range(48))
    assert [len(one) for one in samples] == num_samples
    assert [2 * steps for _, steps in found] == num_samples


def count_collectives(rank: int, world: int, sizes: tuple[int, int], plain: bool) -> Any:
    """Count the collectives of three local steps without a round."""
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
                counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    class Counted(ShardedModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                mode.__enter__()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                mode.__exit__(None, None, None)

    mode = Counting()
    if plain:
        strategy: Any = ModelParallelStrategy(*sizes)
    else:
        strategy = LocoModelParallelStrategy(DiLoCoStrategy(sync_every=100), *sizes)
    settings: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    trainer = make_trainer(strategy, max_epochs=1, **settings)
    trainer.fit(Counted(), *loaders(rank, Run(), sizes))
    return dict(counts)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_local_steps_have_no_more_collectives_than_plain_ones(pool: Pool, layout: str) -> None:
    data, tensor = SHARDED[layout]
    own, *_ = pool.run(count_collectives, (data, tensor), False)
    plain, *_ = pool.run(count_collectives, (data, tensor), True, world=2)
    plain = {name: number for name, number in plain.items() if "broadcast" not in name}
    assert own == plain
    assert own


# ------------------------------------------------------------------- other identities


def fit_one_worker(rank: int, world: int, strategy: str) -> Tensor:
    chosen = LocalSGDStrategy(sync_every=3, replica_size=world) if strategy == "loco" else strategy
    trainer = make_trainer(chosen, max_epochs=2)
    module = TinyModule(optimizer="Adam")
    inputs, targets = worker_batch(0, 0, size=24)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True))
    return flat(module)


def test_one_worker_of_two_ranks_is_ddp(pool: Pool) -> None:
    pl.seed_everything(7, verbose=False)
    loco, ddp = (pool.run(fit_one_worker, name, world=2) for name in ("loco", "ddp"))
    for one, other in zip(loco, ddp, strict=True):
        assert torch.equal(one, other)


# --------------------------------------------------------------------------- logging


def log(rank: int, world: int, folder: str) -> dict[str, Any]:
    strategy = DiLoCoStrategy(sync_every=3, replica_size=SIZE)
    every = {"save_top_k": -1, "save_last": True}
    checkpoint = ModelCheckpoint(Path(folder) / "saved", monitor="val_loss", **every)
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[
            CommunicationMonitor(),
            LearningRateMonitor(),
            WorkerLogs(),
            StragglerSimulator({1: 0.001}),
            checkpoint,
        ],
    )
    module = ValidatedModule()
    trainer.fit(module, loader(rank, SIZE), loader(rank, SIZE, 2))
    return {
        "identity": (strategy.worker, strategy.place, strategy.num_workers),
        "metrics": dict(trainer.logged_metrics),
        "params": flat(module),
        "saved": torch.load(checkpoint.last_model_path, weights_only=True)["state_dict"],
    }


def test_callbacks_that_log_and_save(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(log, str(tmp_path), world=4)
    assert [one["identity"] for one in results] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert "lr-SGD" in (tmp_path / "metrics.csv").read_text().partition("\n")[0]
    for result in results:
        assert result["metrics"]["loco/round"] == 7
        assert result["metrics"]["loco/bytes_sent"] > 0
        saved = torch.cat([value.reshape(-1) for value in result["saved"].values()])
        assert torch.equal(saved, result["params"])
    names = sorted(path.name for path in tmp_path.glob("worker_*.csv"))
    assert names == ["worker_00000.csv", "worker_00001.csv"]


# -------------------------------------------------------------------------- refusals


def size_of_node(rank: int, world: int) -> tuple[int, int, int]:
    strategy = LocalSGDStrategy(sync_every=2, replica_size="node")
    plugins = [PoolEnvironment(num_nodes=2)]
    trainer = make_trainer(
        strategy,
        max_steps=4,
        devices=2,
        num_nodes=2,
        plugins=plugins,
        use_distributed_sampler=False,
    )
    trainer.fit(TinyModule(), loader(rank, SIZE))
    return strategy.replica_size, strategy.worker, strategy.place


def test_node_is_the_number_of_ranks_of_a_node(pool: Pool) -> None:
    assert pool.run(size_of_node, world=4) == [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)]
