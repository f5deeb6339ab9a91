"""A learner of Decoupled DiLoCo: an ordinary Trainer that exchanges with a syncer.

What it shows: the strategy is all that a learner needs. Start as many as you like, on any machine
that can reach the syncer; kill them, and start them again with the same name.

In one terminal: lightning-loco syncer --bind 127.0.0.1:29600 --folder run
In another one: python examples/decoupled/learner.py 127.0.0.1:29600 a 0.03
With a key file (lightning-loco keys run.pem): give its name as the fourth argument.

examples/13_decoupled_learners.py does all of this by itself.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco


class Regression(LightningModule):
    """Learns a wavy surface; local steps take ``step_s`` seconds."""

    def __init__(self, name: str, step_s: float) -> None:
        super().__init__()
        self.name, self.step_s = name, step_s
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        plane = torch.rand(2048, 2) * 4 - 2
        self.points = TensorDataset(plane, (plane[:, :1] * 2).sin() * plane[:, 1:].cos())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.step_s)
        with Path(f"{self.name}.steps").open("a") as file:
            file.write(f"{time.time()}\n")
        self.trainer.should_stop = Path("stop").exists()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, batch_size=32, shuffle=True)


def main(syncer: str, name: str, step_s: str, key_file: str | None = None) -> None:
    seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    strategy = loco.DecoupledDiLoCoStrategy(
        fragments=4, syncer=syncer, key_file=key_file, name=name, summary=False
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=-1, **quiet)
    module = Regression(name, float(step_s))
    trainer.fit(module)
    with torch.no_grad():  # of what this learner has received last
        loss = module.training_step([*module.points[:]], 0)
    Path(f"{name}.json").write_text(json.dumps({"loss": loss.item()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
