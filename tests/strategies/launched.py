"""The program that test_launchers.py starts: two workers train, and each writes its result.

Usage: python launched.py FOLDER START_METHOD [SETTING=VALUE ...]
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_loco import GASLoCStrategy
from tests.harness.small_model import TinyModule, flat, make_loader, quiet_trainer

SETTINGS: dict[str, Any] = {"topology": "ring", "sync_every": 3}
LR = 0.05
STEPS = 6
TIMEOUT_S = 180.0  # longer than the program takes on a busy machine


class LaunchedModule(TinyModule):
    """Each worker trains on different batches, which all its ranks read."""

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(self.trainer.strategy.worker, STEPS)


class WriteResult(pl.Callback):
    """Writes the weights and facts about the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        result = {
            "weights": flat(pl_module),
            "world": trainer.world_size,
            "worker": (trainer.strategy.worker, trainer.strategy.place),
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "launcher": type(trainer.strategy.launcher).__name__,
            "rounds": trainer.strategy.statistics.rounds,
            "process": os.getpid(),
        }
        torch.save(result, self.folder / f"worker{trainer.global_rank}.pt")


def main(folder: Path, start_method: str, changes: list[str]) -> None:
    settings = dict(SETTINGS)
    for change in changes:
        name, _, value = change.partition("=")
        settings[name] = ast.literal_eval(value)
    num_nodes = settings.pop("num_nodes", 1)
    trainer = quiet_trainer(
        strategy=GASLoCStrategy(**settings, timeout_s=TIMEOUT_S, start_method=start_method),
        devices=2,
        num_nodes=num_nodes,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[WriteResult(folder)],
    )
    module = LaunchedModule(lr=LR)
    trainer.fit(module)
    if trainer.global_rank == 0:
        torch.save(flat(module), folder / "returned.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
