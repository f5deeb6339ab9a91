"""Two workers train one model and talk to each other every ten local steps only.

What it shows: the strategy is all that differs from ordinary Lightning code. Each worker has its
own share of the data, steps alone between rounds, and validation sees the consensus of both.

Run it: python examples/01_quickstart.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def points(count: int, seed: int) -> TensorDataset:
    """Points of the plane and the height of a wavy surface over them."""
    generator = torch.Generator().manual_seed(seed)
    plane = torch.rand(count, 2, generator=generator) * 4 - 2
    return TensorDataset(plane, (plane[:, :1] * 2).sin() * plane[:, 1:].cos())


def main() -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=loco.DiLoCoStrategy(sync_every=10),  # instead of "ddp"
        accelerator="cpu",
        devices=2,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    train = DataLoader(points(1024, seed=1), batch_size=32, shuffle=True)
    trainer.fit(Regression(), train, DataLoader(points(512, seed=2), batch_size=256))
    if trainer.is_global_zero:
        cost = trainer.strategy.statistics
        print(
            f"validation loss {trainer.callback_metrics['val_loss']:.4f} "
            f"after {trainer.global_step} local steps on each of {trainer.world_size} workers, "
            f"{cost.rounds} rounds and {cost.bytes_sent / 1000:.0f} kB sent by each"
        )


if __name__ == "__main__":
    main()
