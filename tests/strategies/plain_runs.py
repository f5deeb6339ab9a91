"""The same training as a plain loop in one process and with the Trainer in a pool job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_loco import Algorithm, DiLoCo, LocoStrategy
from tests.harness import toys
from tests.harness.pool import make_trainer
from tests.harness.small_model import make_loader, make_model
from tests.harness.toys import LocalStep, plain_step

LR = 0.05


def simulate(
    world: int,
    num_rounds: int,
    step: LocalStep = plain_step,
    make: Callable[[], nn.Module] = make_model,
    sync_every: int | list[int] = 3,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Tensor:
    """Compute the weights after fit with a plain loop of some rounds; by default of DiLoCo."""
    settings = {"step": step, "make": make, "sync_every": sync_every, **settings}
    settings["last_round"] = False
    inner = partial(torch.optim.SGD, lr=LR)
    return toys.simulate(algorithm or DiLoCo(), world, num_rounds, inner=inner, **settings)[-1, 0]


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
    """Train on this worker's batches; by default with DiLoCo."""
    topology = settings.pop("topology", None)
    strategy = LocoStrategy(algorithm or DiLoCo(), sync_every=sync_every, topology=topology)
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **settings}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(module, loader if loader is not None else make_loader(rank, num_batches))
    return strategy


def assert_all_close(results: list[Tensor], expected: Tensor) -> None:
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
