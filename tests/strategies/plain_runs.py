"""The same training twice: as a plain loop in one process, and under the Trainer in a pool job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_loco import DiLoCo, LocoStrategy, Simulation
from tests.pool import make_trainer
from tests.tiny import loss_of, make_loader, make_model, worker_batch

LR = 0.05
LocalStep = Callable[[int, nn.Module, torch.optim.Optimizer, int], None]


def plain_step(worker: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, worker_batch(worker, step)).backward()
    optimizer.step()


def simulate(
    world: int,
    num_rounds: int,
    local_step: LocalStep = plain_step,
    make: Callable[[], nn.Module] = make_model,
    sync_every: int | list[int] = 3,
    **settings: Any,
) -> Tensor:
    """The consensus of a plain loop over the same batches; DiLoCo unless told otherwise."""
    models = [make() for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    steps = [0] * world
    algorithm = settings.pop("algorithm", DiLoCo())
    simulation = Simulation(models, algorithm, sync_every=sync_every, **settings)

    def one(worker: int) -> None:
        local_step(worker, models[worker], optimizers[worker], steps[worker])
        steps[worker] += 1

    simulation.run(one, num_rounds)
    return simulation.consensus()


def fit(
    rank: int,
    module: LightningModule,
    num_batches: int,
    *,
    sync_every: int | list[int] = 3,
    algorithm: Any = None,
    loader: Any = None,
    **settings: Any,
) -> LocoStrategy:
    """Train on this worker's batches; DiLoCo unless told otherwise."""
    topology = settings.pop("topology", None)
    strategy = LocoStrategy(algorithm or DiLoCo(), sync_every=sync_every, topology=topology)
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **settings}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(module, loader if loader is not None else make_loader(rank, num_batches))
    return strategy


def assert_all_close(results: list[Tensor], expected: Tensor) -> None:
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
