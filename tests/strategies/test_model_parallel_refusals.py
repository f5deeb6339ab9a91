"""What LocoModelParallelStrategy refuses, on all ranks before training."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

import lightning_loco as loco
from lightning_loco import (
    DiLoCoStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
)
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, quiet_trainer
from tests.harness.weight_averaging import EMAWeightAveraging, needs_weight_averaging
from tests.strategies.families import Run, ShardedModule, loaders

# ----------------------------------------------------------------------- construction


def test_values_that_are_refused(subtests: pytest.Subtests) -> None:
    for method, sizes, error, message in (
        (PairwiseGossipStrategy(), (), TypeError, "a strategy with rounds such as DiLoCoStrategy"),
        (RemoteOptimizerStrategy(), (), TypeError, "method must be a strategy with rounds"),
        (LocoModelParallelStrategy(), (), TypeError, "method must be a strategy with rounds"),
        ("diloco", (), TypeError, "method must be .*, got 'diloco'"),
        (DiLoCoStrategy(replica_size=2), (), ValueError, "Leave replica_size out"),
        (DiLoCoStrategy(replica_size="node"), (), ValueError, "Leave replica_size out"),
        (DiLoCoStrategy(checkpoint_folder="private"), (), ValueError, "checkpoint_folder='shared'"),
        (DiLoCoStrategy(static_graph=True), (), ValueError, "static_graph=True, which only DDP"),
        (DiLoCoStrategy(start_method="spawn"), (), ValueError, "start_method='spawn'"),
        (None, (0,), ValueError, "data_parallel_size is .* at least 1, got 0"),
        (None, (2, 0), ValueError, "tensor_parallel_size is .* at least 1, got 0"),
        (None, ("all",), TypeError, "data_parallel_size .* integer, got 'all'"),
        (None, (2, "auto"), TypeError, "tensor_parallel_size .* integer, got 'auto'"),
        (None, (True,), TypeError, "data_parallel_size .* integer, got True"),
    ):
        with subtests.test(message), pytest.raises(error, match=message):
            LocoModelParallelStrategy(method, *sizes)


def test_the_method_and_its_plugins_are_used() -> None:
    class Io(loco.strategies.checkpoint.atomic_io.WholeFileIO):  # type: ignore[name-defined]
        pass

    method = DiLoCoStrategy(
        sync_every=7, timeout_s=11, summary=False, evaluate="outer", checkpoint_io=Io()
    )
    strategy = LocoModelParallelStrategy(method, 2, 3)
    assert strategy.settings is method.settings
    assert (strategy.timeout_s, strategy.summary, strategy.evaluate) == (11, False, "outer")
    assert isinstance(strategy.checkpoint_io, Io)
    assert strategy.replica_size == 6
    assert strategy.replica_arguments == "data_parallel_size=2, tensor_parallel_size=3"


def test_the_name_is_diloco_of_workers_of_one_node() -> None:
    strategy = quiet_trainer(strategy="loco_model_parallel", devices=4).strategy
    assert isinstance(strategy, LocoModelParallelStrategy)
    assert strategy.settings == DiLoCoStrategy().settings
    assert (strategy.data_parallel_size, strategy.tensor_parallel_size) == (4, 1)
    assert (strategy.num_workers, strategy.replica_size) == (1, 4)


# ---------------------------------------------------------------------- before training


class OverAllRanks(ShardedModule):
    """Sharded over a mesh that the module has made itself."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


class OtherLayout(ShardedModule):
    """The second worker shards columns."""

    hidden = 8

    def shard(self, mesh: DeviceMesh) -> None:
        def columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.shape == (1, 8) else None

        strategy: Any = self.trainer.strategy
        own = columns if strategy.worker == 1 else None
        fully_shard(self.model, mesh=mesh, shard_placement_fn=own)


class OneWhole(ShardedModule):
    """The second worker does not shard."""

    def shard(self, mesh: DeviceMesh) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.worker == 0:
            fully_shard(self.model, mesh=mesh)
        else:
            for name, parameter in list(self.model.named_parameters()):
                path, _, leaf = name.rpartition(".")
                whole = distribute_tensor(parameter, mesh, [Replicate()])
                setattr(self.model.get_submodule(path), leaf, nn.Parameter(whole))


class PartlySharded(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh)


class PartialSum(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model, mesh=mesh)
        made = DTensor.from_local(torch.ones(2, dtype=torch.float64), mesh, [Partial()])
        self.model.register_parameter("partial", nn.Parameter(made))


class Fsdp1Layer(FullyShardedDataParallel):
    """A real one needs a GPU."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Fsdp1(ShardedModule):
    def shard(self, mesh: DeviceMesh) -> None:
        super().shard(mesh)
        self.model.append(Fsdp1Layer())


class NoHook(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Averaging(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = AveragedModel(pl_module)


def averaging() -> list[Callback]:
    return [Averaging()]


def moving_average() -> list[Callback]:
    return [EMAWeightAveraging()]


def finder() -> list[Callback]:
    return [LearningRateFinder()]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(0.1)]


def pruning() -> list[Callback]:
    return [ModelPruning("l1_unstructured", amount=0.5)]


def momentum(**arguments: Any) -> LocoStrategy:
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    return DiLoCoStrategy(outer_optimizer=outer, **arguments)


def refuse(rank: int, world: int, run: Run, sizes: tuple[int, int]) -> tuple[str, str]:
    trainer = make_trainer(run.strategy(sizes), max_epochs=1, callbacks=run.callbacks())
    module = run.module()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        trainer.fit(module, *loaders(rank, run, sizes))
    assert not module.losses
    return type(error.value).__name__, str(error.value)


REFUSED: dict[str, tuple[Run, tuple[int, int], str, str]] = {
    "number of ranks": (
        Run(),
        (3, 1),
        "ValueError",
        "= 3 ranks, but there are 4 ranks. Start a multiple of 3",
    ),
    "another mesh": (
        Run(module=OverAllRanks),
        (2, 1),
        "ValueError",
        "is distributed over a mesh with rank",
    ),
    "other layouts": (Run(module=OtherLayout), (2, 1), "ValueError", "worker 0: .* on worker 0"),
    "whole copies on one worker": (Run(module=OneWhole), (2, 1), "ValueError", "on worker 0"),
    "parameters left out": (
        Run(module=PartlySharded),
        (2, 1),
        "ValueError",
        "'model.2.weight' is not sharded over the data_parallel ranks",
    ),
    "partial sums": (Run(module=PartialSum), (2, 1), "ValueError", "must not be a partial sum"),
    "FSDP1": (Run(module=Fsdp1), (2, 1), "TypeError", "only supports the new FSDP2 APIs"),
    "no configure_model": (Run(module=NoHook), (2, 1), "TypeError", "override .*configure_model"),
    "the whole vector": (Run(momentum), (2, 1), "ValueError", "needs the whole vector"),
    "averaged copies": (
        Run(callbacks=averaging),
        (2, 1),
        "ValueError",
        "Averaging needs the whole",
    ),
    "stochastic averages": (Run(callbacks=swa), (2, 1), "ValueError", "StochasticWeightAveraging"),
    "a learning rate finder": (
        Run(callbacks=finder),
        (2, 1),
        "ValueError",
        "Find the learning rate with a strategy with replica_size=",
    ),
    "pruning": (Run(callbacks=pruning), (1, 2), "ValueError", "ModelPruning needs the whole model"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_on_all_ranks(pool: Pool, name: str) -> None:
    run, sizes, kind, message = REFUSED[name]
    for found, text in pool.run(refuse, run, sizes):
        assert found == kind
        assert re.search(message, text), text


@needs_weight_averaging
def test_a_moving_average_is_refused_before_it_copies_the_model(pool: Pool) -> None:
    for found, text in pool.run(refuse, Run(callbacks=moving_average), (2, 1)):
        assert found == "ValueError"
        assert text.startswith("EMAWeightAveraging needs the whole model on every rank")
