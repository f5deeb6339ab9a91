"""StragglerSimulator: delays chosen workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_loco.strategies.worker_strategy import worker_and_place


class StragglerSimulator(pl.Callback):
    """Delay every training batch of chosen workers, for demonstrations and tests.

    Args:
        delays: Seconds of delay per batch, by worker number.

    Raises:
        ValueError: If a delay is negative or not finite.

    Example::

        Trainer(callbacks=[StragglerSimulator({0: 0.05})])  # worker 0 sleeps 50 ms per batch
    """

    def __init__(self, delays: Mapping[int, float]) -> None:
        self.delays = {int(worker): float(delay_s) for worker, delay_s in delays.items()}
        for worker, delay_s in self.delays.items():
            if not 0 <= delay_s < math.inf:
                raise ValueError(
                    f"delays are seconds, finite and not negative, got {delay_s} for worker "
                    f"{worker}."
                )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sleep, if this worker has a delay."""
        worker, _ = worker_and_place(trainer.strategy)
        time.sleep(self.delays.get(worker, 0.0))
