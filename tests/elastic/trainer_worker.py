"""One elastic worker in a process of its own: a fit with a schedule of learning rates."""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    CommunicationMonitor,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocoStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies import lightning_compat
from tests.elastic.arguments import elastic_of, make_parser
from tests.elastic.worker import checksum
from tests.small_model import TinyModule, flat, quiet_trainer


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples that know their number."""

    def __init__(self, count: int = 4000) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((3,), index / 4000, dtype=torch.float64)


class Model(TinyModule):
    """Least squares with a learning rate and a momentum that change in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, inputs = batch
        return (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=1000)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Notes(Callback):
    """Writes down every round, and which samples were used in it."""

    def __init__(self, path: Path, step_s: float) -> None:
        self._path = path
        self._step_s = step_s
        self._samples: list[int] = []
        self._round: int | None = None
        self._line: dict[str, Any] = {}

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        time.sleep(self._step_s)
        self._write(trainer)
        self._samples += batch[0].tolist()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._look(trainer)
        self._write(trainer)

    def _look(self, trainer: Any) -> None:
        """Right after a round."""
        engine = trainer.strategy.engine
        before, self._round = self._round, engine.worker.round_index
        if before is None or self._round != before + 1:  # at the end there may be two at once
            return
        last = engine.connection.last_round
        self._line = {
            "round": engine.worker.round_index,
            "steps": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "betas": trainer.optimizers[0].param_groups[0]["betas"],
            "members": [] if last is None else list(last.plan.names),
            "own": "" if last is None else last.plan.names[last.plan.rank],
            "weights": [] if last is None else last.statuses[:, 3].tolist(),
            "checksum": checksum(engine),
        }

    def _write(self, trainer: Any) -> None:
        line, self._line = self._line, {}
        if line:
            metrics = trainer.callback_metrics.items()
            line["logged"] = {name: float(value) for name, value in metrics}
            line["logged_step"] = lightning_compat.logged_step(trainer)
            line["samples"], self._samples = self._samples, []
            line["time"] = time.time()
            with open(self._path, "a") as log:
                log.write(json.dumps(line) + "\n")


class Writer(Callback):
    """Writes weights at the begin of an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self._epoch:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()


def main(arguments: list[str]) -> None:
    """Fit."""
    parser = make_parser()
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--gossip", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--num-loaders", type=int, default=0)
    parser.add_argument("--epoch-steps", type=int)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--resume")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--dev-run", action="store_true")
    parser.add_argument("--writes-at", type=int, default=-1)
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored

    torch.manual_seed(asked.index)
    kind: Callable[..., LocoStrategy]
    kind = DiLoCoStrategy
    if asked.overlap:
        kind = functools.partial(AsyncDiLoCoStrategy, fragments=None)
    if asked.gossip:
        kind = GASLoCStrategy
    if asked.stream:
        kind = functools.partial(StreamingDiLoCoStrategy, fragments=2, delay=1)
    strategy = kind(sync_every=4, membership=elastic_of(asked))
    trainer: Trainer = quiet_trainer(
        strategy=strategy,
        max_steps=asked.max_steps,
        limit_train_batches=asked.epoch_steps,
        callbacks=[CommunicationMonitor(), Writer(asked.writes_at), Notes(asked.log, asked.step_s)],
        log_every_n_steps=1,
        fast_dev_run=asked.max_steps if asked.dev_run else False,
        default_root_dir=asked.log.with_suffix(""),
    )
    loader = DataLoader(
        Numbered(asked.samples), batch_size=2, shuffle=True, num_workers=asked.num_loaders
    )
    model = Model()
    trainer.fit(model, loader, ckpt_path=asked.resume)
    end = {"model": flat(model).tolist(), "rounds": strategy.statistics.rounds}
    asked.log.with_suffix(".end").write_text(json.dumps(end))
