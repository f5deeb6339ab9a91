"""Every method at its defaults on a short first run, beside DDP and workers that never exchange.

A small image classifier with BatchNorm and AdamW is trained by ``Trainer(strategy="NAME_notebook",
devices=2)`` for 96 local steps, with a validation after each of its three epochs. The images are
made on the spot.

  python benchmarks/defaults.py
  python benchmarks/defaults.py --only diloco async_diloco --seeds 0 1 2 3 4

How to read it: ``loss`` is of the model that ``fit`` returns, on images that it has not seen;
``alone`` is the mean of the losses of two workers that never exchange. Means over the seeds, with
standard deviations. ``above alone`` is the difference with the same seed; it is too much if it is
more than two of its standard deviations above zero and the run gives no advice. ``bytes`` are what
worker 0 sends, relative to DDP, with the averages that are validated. ``advice`` says whether a
line before training says that the rounds are too far apart. Asynchronous model average and pairwise
gossip follow the clock, so their numbers differ from run to run.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from harness import mean_and_deviation
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import LocalSGDStrategy
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.summary import bytes_of_ddp

CLASSES, BATCH, EPOCHS, STEPS, WORKERS = 10, 16, 3, 96, 2
BYTES_BOUND, DEVIATIONS = 1.02, 2.0
ROWS = ("ddp", "alone", *METHODS)


def images(count: int, seed: int) -> TensorDataset:
    """Images with the pattern of their class, shifted and with noise."""
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    rolled = [torch.roll(patterns[k], by, (1, 2)) for k, by in zip(labels, shifts, strict=True)]
    noise = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(torch.stack(rolled) + 1.5 * noise, labels)


class Classifier(LightningModule):
    """Convolutions with BatchNorm: 1946 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        """The mean cross-entropy."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Result(NamedTuple):
    """What a worker ends with: the loss of its model, bytes sent relative to DDP, and advice."""

    loss: float
    sent: float
    advice: list[str]


class Report(Callback, logging.Handler):
    """Writes the result of each worker into a file."""

    def __init__(self, folder: Path) -> None:
        logging.Handler.__init__(self)
        self.folder, self.advice = folder, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if " Use " in record.getMessage():
            self.advice.append(record.getMessage())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(self)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        pl_module.eval()
        with torch.no_grad():
            loss = float(pl_module.loss(images(2048, seed=10_000).tensors))
        numel = sum(parameter.numel() for parameter in pl_module.parameters())
        statistics = getattr(trainer.strategy, "statistics", None)
        of_ddp = bytes_of_ddp(WORKERS, 4 * numel, STEPS)
        sent = (statistics.bytes_sent if statistics is not None else of_ddp) / of_ddp
        result = Result(loss, sent, self.advice)
        (self.folder / str(trainer.global_rank)).write_text(json.dumps(result))


def fit(name: str, seed: int) -> list[Result]:
    """Train with a method at its defaults, and return what each worker ends with."""
    strategy: Any = f"{name}_notebook"
    if name == "alone":
        strategy = LocalSGDStrategy(10**6, finalize="keep", start_method="fork")
    seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            devices=WORKERS + (name == "remote_optimizer"),
            accelerator="cpu",
            max_epochs=EPOCHS,
            callbacks=[Report(Path(folder))],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        train = DataLoader(images(STEPS * BATCH * WORKERS // EPOCHS, seed), BATCH, shuffle=True)
        trainer.fit(Classifier(), train, DataLoader(images(256, seed=20_000), 128))
        files = [Path(folder) / str(rank) for rank in range(WORKERS)]
        return [Result(*json.loads(file.read_text())) for file in files]


def cells(name: str, results: list[list[Result]], alone: list[list[Result]]) -> list[str]:
    """A row of the table; there are the results of all workers for each seed."""
    losses, of_alone = (
        [statistics.fmean(worker.loss for worker in workers) for workers in of_seeds]
        for of_seeds in (results, alone)
    )
    above = [loss - other for loss, other in zip(losses, of_alone, strict=True)]
    sent = max(workers[0].sent for workers in results)
    advice = all(workers[0].advice for workers in results)
    bound = DEVIATIONS * statistics.stdev(above) if len(above) > 1 else 0.0
    is_bad = statistics.fmean(above) > bound and not advice and name != "alone"
    return [
        name,
        mean_and_deviation(losses, 3),
        mean_and_deviation(above, 3),
        "MISSED" if is_bad else "ok",
        f"{sent:.3f}",
        harness.at_most(sent, BYTES_BOUND),
        "yes" if advice else "",
    ]


def main() -> None:
    options = harness.parse(
        __doc__, only=ROWS, seeds=[0, 1, 2], quick={"seeds": [0]}, choices={"only": ROWS}
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results, refused = {}, []
    for name in dict.fromkeys(["alone", *options.only]):
        try:
            results[name] = [fit(name, seed) for seed in options.seeds]
        except ProcessRaisedException as error:
            refused.append(f"{name}: {str(error).strip().splitlines()[-1]}")
    rows = [cells(name, of_seeds, results["alone"]) for name, of_seeds in results.items()]
    harness.print_table(
        ["method", "loss", "above alone", "bound", "bytes", "bound", "advice"], rows
    )
    print("\n".join(refused))


if __name__ == "__main__":
    main()
