"""Trainers with a remote optimizer inside the pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.pool import PoolEnvironment, make_trainer
from tests.harness.programs import free_ports
from tests.harness.small_model import flat


class PortEnvironment(PoolEnvironment):
    """An environment of ranks that connect by a port, without a default group.

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

    The ranks wait in the store: destroying the group while others connect would end them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world)])
    dist.destroy_process_group()


@contextmanager
def all_ranks(num_nodes: int = 1) -> Iterator[PortEnvironment]:
    """Replace the pool's process group by an environment; destroy the groups made there."""
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
    **settings: Any,
) -> Trainer:
    """Fit one epoch (by default) with a remote optimizer, or another strategy to compare with."""
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **settings}
    if not isinstance(strategy, RemoteOptimizerStrategy):
        trainer = make_trainer(strategy, **settings)
        trainer.fit(module, *data, ckpt_path=ckpt_path)
        return trainer
    with all_ranks() as environment:
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


def remote_or_ddp(num_workers: int | None) -> Strategy:
    """Return a remote optimizer with so many workers, or DDP for None."""
    if num_workers is None:
        return DDPStrategy()
    return RemoteOptimizerStrategy(num_workers, timeout_s=20)
