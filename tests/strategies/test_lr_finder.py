"""The learning rate finder, which trains within ``fit``, does not affect the following run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import ALL_METHODS, BY_TIME, strategy_of

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers")


class Watched(ValidatedModule):
    """Records which model is validated."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(flat(self))


def trainer_of(method: str, **settings: Any) -> Trainer:
    strategy = strategy_of(method, 40 if method == "async_diloco" else 3)
    return make_trainer(strategy, use_distributed_sampler=False, **settings)


def fit(rank: int, world: int, method: str, folder: str, lr: float | None) -> dict[str, Any]:
    finder = LearningRateFinder(1e-4, 0.1, num_training_steps=30, early_stop_threshold=None)
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_of(
        method,
        max_epochs=2,
        callbacks=[saving, *([finder] if lr is None else [])],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    module = Watched(0.5 if lr is None else lr)
    trainer.fit(module, make_loader(rank, 50), make_loader(0, 1))
    return {
        "lr": module.lr,
        "final": flat(module),
        "validated": module.validated[-2:],
        "steps": trainer.global_step,
        "rounds": trainer.strategy.statistics.rounds,
        "distance": trainer.strategy.statistics.consensus_distance,
    }


@pytest.mark.soak
@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_search_and_then_a_fit(pool: Pool, tmp_path: Path, method: str) -> None:
    results = pool.run(fit, method, str(tmp_path / "search"), None, world=2)
    lr = results[0]["lr"]
    assert 1e-4 < lr < 0.1
    for result in results:
        assert (result["lr"], result["steps"]) == (lr, 100)
        assert torch.equal(result["final"], results[0]["final"])
        for one, other in zip(result["validated"], results[0]["validated"], strict=True):
            assert torch.equal(one, other)
    names = ["epoch=0.ckpt", "epoch=0.ckpt.loco", "epoch=1.ckpt", "epoch=1.ckpt.loco"]
    assert sorted(os.listdir(tmp_path / "search")) == names
    assert len(list((tmp_path / "search" / "epoch=1.ckpt.loco").glob("*/worker_*.pt"))) == 2
    if method not in BY_TIME:
        plain = pool.run(fit, method, str(tmp_path / "plain"), lr, world=2)
        for result, without in zip(results, plain, strict=True):
            assert torch.equal(result["final"], without["final"])
            assert result["rounds"] == without["rounds"]
            assert result["distance"] == without["distance"]


class AtMilestones(LearningRateFinder):
    """Runs the finder at the start of epochs, as in Lightning's documentation."""

    def on_fit_start(self, *args: Any) -> None:
        self.found: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lr_find(trainer, pl_module)
        self.found.append(pl_module.lr)


def fit_with_milestones(rank: int, world: int, folder: str) -> tuple[list[float], Tensor, int]:
    finder = AtMilestones(1e-4, 0.1, num_training_steps=30, early_stop_threshold=None)
    trainer = trainer_of("diloco", max_epochs=2, callbacks=[finder], default_root_dir=folder)
    module = Watched(0.5)
    trainer.fit(module, make_loader(rank, 50), make_loader(0, 1))
    return finder.found, flat(module), trainer.global_step


def test_searches_at_the_start_of_epochs(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(fit_with_milestones, str(tmp_path), world=2)
    for found, final, steps in results:
        assert len(found) == 2
        assert found == results[0][0]
        assert steps == 100
        assert torch.equal(final, results[0][1])


def tune(rank: int, world: int, folder: str) -> tuple[float, Tensor]:
    trainer = trainer_of("diloco", max_epochs=1, default_root_dir=folder)
    module, loader = TinyModule(0.5), make_loader(rank, 50)
    Tuner(trainer).lr_find(module, loader, min_lr=1e-4, max_lr=0.1, num_training=30)
    lr = module.lr
    trainer.fit(module, loader)
    return lr, flat(module)


def test_the_tuner_and_then_a_fit(pool: Pool, tmp_path: Path) -> None:
    (lr, final), (lr_1, final_1) = pool.run(tune, str(tmp_path), world=2)
    assert lr == lr_1 != 0.5
    assert torch.equal(final, final_1)
    assert not list(tmp_path.iterdir())
