"""A small model and data for tests: least squares, float64, different data on every worker."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Every Trainer searches installed packages for callbacks: a tenth of the time of a short fit.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]

FEATURES = 3


def worker_batch(worker: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return the batch of a worker at a local step; each worker has another target."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    target = inputs @ torch.arange(1.0, FEATURES + 1, dtype=torch.float64) + worker
    return inputs, target


def make_model(seed: int = 0) -> nn.Sequential:
    """Return two layers, so that there are parameters of different shapes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def norm_model(seed: int = 0) -> nn.Sequential:
    """Return a model with BatchNorm, whose statistics are buffers."""
    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    inputs, target = batch
    return (model(inputs).squeeze(-1) - target).square().mean()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *batches: tuple[Tensor, Tensor],
    clip: float | None = None,
) -> None:
    """Take an optimizer step on the mean loss of the batches."""
    optimizer.zero_grad()
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


class WorkerData(Dataset[tuple[Tensor, Tensor]]):
    """``num_steps`` batches of one worker."""

    def __init__(self, worker: int, num_steps: int) -> None:
        self.worker = worker
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return worker_batch(self.worker, step)


def make_loader(worker: int, num_steps: int) -> DataLoader[Any]:
    """Return a loader of the batches of :func:`worker_batch`, in order."""
    return DataLoader(WorkerData(worker, num_steps), batch_size=None)


class TinyModule(LightningModule):
    """The small model under Lightning."""

    def __init__(self, lr: float = 0.05, optimizer: str = "SGD") -> None:
        super().__init__()
        self.model = make_model()
        self.lr = lr
        self.optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


class ValidatedModule(TinyModule):
    """The small model with validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)


def flat(module: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a CPU Trainer that writes nothing; settings replace or add to the defaults."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **settings})
