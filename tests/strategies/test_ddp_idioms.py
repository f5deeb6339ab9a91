"""Code that was written for DDP works."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from lightning_loco import AsyncDiLoCoStrategy, DiLoCoStrategy
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, WorkerData, flat, make_loader, worker_batch
from tests.strategies.families import fit_with, strategy_of

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers")

# --------------------------------------------------------------------- trainer.model


class UsesWrapper(TinyModule):
    """Uses attributes of DDP's wrapper."""

    def on_train_start(self) -> None:
        assert self.trainer.model.module is self
        assert self.trainer.strategy.model.module is self
        assert self.trainer.model.lr == self.lr  # all attributes of the module
        assert list(self.trainer.model.state_dict()) == [f"module.{k}" for k in self.state_dict()]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with self.trainer.model.no_sync():
            return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", self.trainer.model(batch[0]).mean(), sync_dist=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def fit_wrapper(rank: int, world: int) -> bool:
    module = UsesWrapper()
    trainer = make_trainer(DiLoCoStrategy(sync_every=3), max_epochs=1)
    trainer.fit(module, make_loader(rank, 6), make_loader(rank, 2))
    return trainer.model is module and list(module.state_dict()) == list(TinyModule().state_dict())


def test_names_of_the_wrapper(pool: Pool) -> None:
    assert pool.run(fit_wrapper, world=2) == [True, True]


# ------------------------------------------------------------------------ epoch hooks


class CollectivesBetweenEpochs(TinyModule):
    """Calls collectives without the strategy at the start and end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.means: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        dist.barrier()

    def on_train_epoch_end(self) -> None:
        total = torch.tensor(float(len(self.losses)))
        dist.all_reduce(total)
        self.means.append(self.mean.compute().item())
        dist.barrier()


def fit_with_collectives(rank: int, world: int, method: str) -> tuple[list[float], float, Tensor]:
    module = CollectivesBetweenEpochs()
    strategy = strategy_of(method, 2, timeout_s=15)
    trainer = fit_with(strategy, module, make_loader(rank, 4 + 6 * rank), max_epochs=2)
    return module.means, trainer.callback_metrics["mean"].item(), flat(module)


@pytest.mark.parametrize("method", ["local_sgd", "async_diloco", "gasloc", "async_model_average"])
def test_collectives_in_hooks_of_epochs_with_uneven_data(pool: Pool, method: str) -> None:
    results = pool.run(fit_with_collectives, method, world=2, timeout_s=30)
    for means, logged, final in results:
        assert means == results[0][0]
        assert logged == results[0][1] == means[-1]
        assert torch.equal(final, results[0][2])


# ---------------------------------------------------------------------- lengths of runs


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """An iterable dataset of unknown length."""

    def __init__(self, worker: int, num_steps: int) -> None:
        self.worker = worker
        self.num_steps = num_steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (worker_batch(self.worker, step) for step in range(self.num_steps))


def fit_unknown(rank: int, world: int, settings: dict[str, Any]) -> tuple[int, Tensor]:
    module = TinyModule()
    strategy = AsyncDiLoCoStrategy(sync_every=4, fragments=None, timeout_s=20)
    trainer = fit_with(strategy, module, DataLoader(Endless(rank, 20), batch_size=None), **settings)
    return trainer.global_step, flat(module)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 1}, 20),
        ({"max_epochs": -1, "max_time": {"seconds": 1}}, None),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 3}, 3),
    ],
)
def test_overlap_with_data_of_unknown_length(
    pool: Pool, settings: dict[str, Any], steps: int | None
) -> None:
    results = pool.run(fit_unknown, settings, world=2)
    for made, final in results:
        assert steps is None or made == steps
        assert torch.equal(final, results[0][1])


# ------------------------------------------------------------------------- checkpoints


class NumpySGD(torch.optim.SGD):
    """Has NumPy numbers in its state, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                done = self.state[parameter].get("done", np.float64(0.0))
                self.state[parameter]["done"] = done + np.float64(1.0)
                parameter.data.mul_(1 - 0.01 * float(done))
        return loss


class NumpyModule(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NumpySGD(self.parameters(), lr=0.05, momentum=0.9)


def fit_numpy(rank: int, world: int, folder: str, resume: str | None) -> Tensor:
    saving = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=4, save_top_k=-1
    )
    settings: Any = {"enable_checkpointing": True, "use_distributed_sampler": False}
    trainer = make_trainer(
        DiLoCoStrategy(sync_every=3), max_steps=10, callbacks=[saving], **settings
    )
    module = NumpyModule()
    loader = StatefulDataLoader(WorkerData(rank, 12), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return flat(module)


@pytest.mark.skipif(
    "weights_only" not in inspect.signature(Trainer.fit).parameters,
    reason="fit of this version of Lightning has no weights_only",
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_numbers_of_numpy_in_the_state_of_an_optimizer(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(fit_numpy, str(tmp_path), None, world=2)
    again = pool.run(fit_numpy, str(tmp_path), str(tmp_path / "step=4.ckpt"), world=2)
    for one, other in itertools.zip_longest(whole, again):
        assert torch.equal(one, other)
