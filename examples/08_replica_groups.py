"""Two workers of two ranks each: DDP inside a worker, rare rounds between the workers.

What it shows: with replica_size=2, ranks 0 and 1 are one worker, and ranks 2 and 3 another. The
ranks of a worker average their gradients in every step, so their parameters stay equal. The workers
differ until they exchange, every ten local steps. In a round each rank sends its half of the
parameters to the rank of equal place in the other worker.

Run it: python examples/08_replica_groups.py
"""

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco

SYNC_EVERY = 10


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


class CompareRanks(Callback):
    """Prints one parameter of every rank before the first round, which the next batch begins."""

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, *_: object, **__: object
    ) -> None:
        if trainer.global_step == SYNC_EVERY:
            own = module.net[0].bias.detach()[:1]
            found = [torch.empty_like(own) for _ in range(trainer.world_size)]
            dist.all_gather(found, own)
            if trainer.is_global_zero:
                values = ", ".join(f"{value.item():.6f}" for value in found)
                print(f"a parameter on ranks 0 to 3, before the first round: {values}")


def points(count: int, seed: int) -> TensorDataset:
    """Points of the plane and the height of a wavy surface over them."""
    generator = torch.Generator().manual_seed(seed)
    plane = torch.rand(count, 2, generator=generator) * 4 - 2
    return TensorDataset(plane, (plane[:, :1] * 2).sin() * plane[:, 1:].cos())


def main() -> None:
    seed_everything(0, verbose=False)
    strategy = loco.DiLoCoStrategy(sync_every=SYNC_EVERY, replica_size=2)
    trainer = Trainer(
        strategy=strategy,
        callbacks=[CompareRanks()],
        accelerator="cpu",
        devices=4,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    train = DataLoader(points(1024, seed=1), batch_size=16, shuffle=True)
    trainer.fit(Regression(), train, DataLoader(points(512, seed=2), batch_size=128))
    if trainer.is_global_zero:
        cost = trainer.strategy.statistics
        print(
            f"validation loss {trainer.callback_metrics['val_loss']:.4f} after "
            f"{trainer.global_step} local steps of {strategy.num_workers} workers with "
            f"{strategy.replica_size} ranks each, {cost.rounds} rounds and "
            f"{cost.bytes_sent / 1000:.0f} kB sent by each rank"
        )


if __name__ == "__main__":
    main()
