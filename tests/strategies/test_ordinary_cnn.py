"""An ordinary image classifier with every strategy: loss curve, best checkpoint, final model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.strategies.registry import METHODS
from lightning_loco.strategies.summary import bytes_of_ddp
from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pool import Pool
from tests.strategies.families import BY_TIME, fit_with

EPOCHS = 5
CLASSES = 4


@functools.cache
def make_images(count: int, seed: int) -> TensorDataset:
    """Make images that contain their class's pattern, shifted, with noise."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    images = [torch.roll(patterns[k], move, (1, 2)) for k, move in zip(labels, moves, strict=True)]
    noise = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(torch.stack(images) + noise, labels)


class Classifier(LightningModule):
    """Convolutions with normalization, OneCycle, and an accuracy of torchmetrics."""

    def __init__(self, normalization: str) -> None:
        super().__init__()
        self.save_hyperparameters()

        def norm(channels: int) -> nn.Module:
            return (
                nn.BatchNorm2d(channels) if normalization == "batch" else nn.GroupNorm(4, channels)
            )

        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            norm(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            norm(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 16, CLASSES),
        )
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", cross_entropy(scores, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Curve(EarlyStopping):
    """Records monitored values."""

    def __init__(self) -> None:
        super().__init__("val_loss", patience=2)
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, module: LightningModule) -> None:
        super().on_validation_end(trainer, module)
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def strategy_of(name: str) -> Strategy:
    """Make a strategy with rounds within the epochs, and at the end of the third one."""
    if name == "ddp":
        return DDPStrategy()
    if name == "remote_optimizer":
        return RemoteOptimizerStrategy(num_workers=2)
    kind = METHODS[name]
    return kind(**({"sync_every": 6} if "sync_every" in kind.__init__.__annotations__ else {}))


def loss_of(module: Classifier) -> float:
    images, labels = make_images(256, seed=2).tensors
    module.eval()
    with torch.no_grad():
        return float(cross_entropy(module.net(images), labels))


def fit(rank: int, world: int, name: str, normalization: str, folder: Path) -> dict[str, Any]:
    module, curve = Classifier(normalization), Curve()
    best = ModelCheckpoint(folder, monitor="val_loss")
    settings = {"max_epochs": EPOCHS, "callbacks": [curve, best], "enable_checkpointing": True}
    train = DataLoader(make_images(512, seed=1), batch_size=32, shuffle=True)
    validation = DataLoader(make_images(256, seed=2), batch_size=64)
    settings["use_distributed_sampler"] = True
    trainer = fit_with(strategy_of(name), module, train, validation, **settings)
    if best.best_model_score is None:  # the server rank
        return {}
    is_there = trainer.is_global_zero
    return {
        "losses": curve.losses,
        "best": float(best.best_model_score),
        "of best": loss_of(Classifier.load_from_checkpoint(best.best_model_path))
        if is_there
        else 0,
        "final": loss_of(module),
        "steps": trainer.global_step,
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in memory if possible: checkpoints are synced to disk, which takes long."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("normalization", ["batch", pytest.param("group", marks=pytest.mark.soak)])
def test_an_ordinary_classifier(
    pool: Pool, folder: Path, normalization: str, subtests: pytest.Subtests
) -> None:
    """No plateau and no dip; files hold the validated models; fit returns the last of them."""
    for name in ("ddp", *METHODS):
        with subtests.test(name):
            world = 3 if name == "remote_optimizer" else 2
            results = pool.run(fit, name, normalization, folder / name, world=world)[:2]
            first = results[0]
            losses = first["losses"]
            print(name, [round(loss, 3) for loss in losses], round(first["final"], 3))
            assert len(losses) == EPOCHS
            assert len(set(losses)) == EPOCHS
            for before, after in zip(losses, losses[1:], strict=False):
                assert after < before + 0.1
            # The number of fetches depends on the speed of this machine.
            assert losses[-1] < (0.9 if name == "pairwise_gossip" else 0.7) * losses[0]
            assert first["best"] == min(losses)
            assert first["of best"] == pytest.approx(first["best"], rel=1e-4)
            for result in results:
                assert result["losses"] == losses
                assert result["final"] == pytest.approx(losses[-1], rel=1e-4)


class ConstantRate(Classifier):
    """The classifier with AdamW and no schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_at_defaults(rank: int, world: int, name: str, epochs: int) -> dict[str, Any]:
    """Train for 16 local steps an epoch."""
    module, strategy = ConstantRate("batch"), METHODS[name]()
    train = DataLoader(make_images(64, seed=1), batch_size=2, shuffle=True)
    validation = DataLoader(make_images(64, seed=2), batch_size=64)
    with messages_of(RANK_ZERO) as texts:
        fit_with(
            strategy, module, train, validation, max_epochs=epochs, use_distributed_sampler=True
        )
    numel = sum(parameter.numel() for parameter in module.parameters())
    return {
        "sent": strategy.statistics.bytes_sent,
        "of ddp": bytes_of_ddp(2, 4 * numel, 16 * epochs),
        "advice": [text for text in texts if " Use " in text],
    }


def test_defaults_on_a_first_run(pool: Pool, subtests: pytest.Subtests) -> None:
    """No method sends more than DDP; a method warns if its rounds are too rare for the run."""
    for name in METHODS:
        with subtests.test(name):
            epochs = 13 if name == "eager_diloco" else 3  # a shorter run is refused
            world = 3 if name == "remote_optimizer" else 2
            results = pool.run(fit_at_defaults, name, epochs, world=world)[:2]
            for result in results:
                assert 0 < result["sent"] <= 1.02 * result["of ddp"]
            advice = results[0]["advice"]
            if name in ("sparta", "remote_optimizer", *BY_TIME):
                assert not advice
            else:
                assert len(advice) == 1
                assert advice[0].startswith("sync_every=100 leaves")
