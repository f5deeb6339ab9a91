"""Code that was written for DDP works."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCoStrategy
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, WorkerData, flat, make_loader

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
