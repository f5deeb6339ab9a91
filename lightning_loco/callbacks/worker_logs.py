"""WorkerLogs: one CSV file per worker."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_loco.strategies.lightning_compat import current_metrics, is_logging_step
from lightning_loco.strategies.summary import errors_as_warnings
from lightning_loco.strategies.worker_strategy import worker_and_place


class WorkerLogs(pl.Callback):
    """Write the metrics of each worker to a file, because loggers only get worker 0's.

    A worker of several ranks writes the metrics of its first rank.

    Files: ``worker_00000.csv`` and so on, with the columns ``step,metric,value``: values of one
    worker only, at its own steps, every ``log_every_n_steps`` steps and after each validation.

    Args:
        dirpath: Folder for the files. Default: the trainer's log folder.

    Example::

        Trainer(callbacks=[WorkerLogs()])
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self._path: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the same folder on all workers; a resumed run appends to existing files."""
        if stage != "fit":
            return
        folder = trainer.strategy.broadcast(
            self.dirpath or trainer.log_dir or trainer.default_root_dir
        )
        worker, place = worker_and_place(trainer.strategy)
        if place > 0:
            self._path = None
            return
        self._path = Path(folder) / f"worker_{worker:05d}.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            self._path.write_text("step,metric,value\n")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write the metrics of this step."""
        if is_logging_step(trainer):
            self._write(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the metrics of the validation."""
        if not trainer.sanity_checking:
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        if self._path is None:
            return
        with (
            errors_as_warnings(f"Metrics cannot be written to {self._path}."),
            self._path.open("a", newline="") as file,
        ):
            writer = csv.writer(file)
            for metric, value in sorted(current_metrics(trainer).items()):
                writer.writerow([trainer.global_step, metric, float(value)])
