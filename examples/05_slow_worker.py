"""A slow worker need not hold up the others: give it fewer local steps per round.

What it shows: a round waits for the slowest worker. Where its pace is known, sync_every takes one
number per worker; the data is shared in the same proportion, and all come to each round at about
the same time. Here the StragglerSimulator makes worker 1 five times slower than worker 0.

Run it: python examples/05_slow_worker.py
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco

DELAYS = {0: 0.01, 1: 0.05}  # seconds per local step


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        plane = torch.rand(1920, 2, generator=torch.Generator().manual_seed(1)) * 4 - 2
        heights = (plane[:, :1] * 2).sin() * plane[:, 1:].cos()
        return DataLoader(TensorDataset(plane, heights), batch_size=16, shuffle=True)


def fit(sync_every: int | list[int]) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=loco.LocalSGDStrategy(sync_every),
        callbacks=[loco.StragglerSimulator(DELAYS)],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression())
    if trainer.is_global_zero:
        cost = trainer.strategy.statistics
        print(
            f"sync_every={sync_every!s:<8} worker 0 made {trainer.global_step} local steps in "
            f"{cost.rounds} rounds and waited {cost.wait_s:.1f} s for worker 1"
        )


def main() -> None:
    fit(10)
    fit([20, 4])


if __name__ == "__main__":
    main()
