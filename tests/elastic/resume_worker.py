"""One rank of an elastic worker, in a separate process, that saves often and may resume."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
)
from tests.elastic.arguments import elastic_of, make_parser
from tests.elastic.trainer_worker import (
    Model,
    Numbered,
    RoundLog,
    ShardedModel,
    set_environment_of_rank,
)
from tests.elastic.worker import checksum
from tests.harness.failing import die, failing_at
from tests.harness.small_model import quiet_trainer

SYNC_EVERY = 4


class SaveOften(Callback):
    """Overwrites a checkpoint every few steps, also within rounds, and logs where it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_started = False

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self._has_started:
            self._has_started = True
            engine = trainer.strategy.engine
            start = {
                "checksum": checksum(engine),
                "round": engine.worker.round_index,
                "steps": trainer.global_step,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
            }
            if trainer.is_global_zero:
                (self._folder / "start.json").write_text(json.dumps(start))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % 3 == 0:
            trainer.save_checkpoint(self._folder / "often.ckpt")


def main(arguments: list[str]) -> None:
    """Train as given by the command line."""
    parser = make_parser(timeout_s=60)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--resume")
    parser.add_argument("--shard", action="store_true", help="over the ranks of the worker")
    parser.add_argument("--fail-at", help="a fault point")
    parser.add_argument("--fail-in", type=int, default=0, help="in this round or a later one")
    args = parser.parse_args(arguments)

    logging.captureWarnings(False)
    warnings.simplefilter("always")
    torch.manual_seed(args.index)
    folder = args.log.parent / str(args.index // args.ranks)
    folder.mkdir(parents=True, exist_ok=True)
    strategy: LocoStrategy | LocoModelParallelStrategy
    if args.overlap:
        strategy = AsyncDiLoCoStrategy(
            sync_every=SYNC_EVERY,
            outer_momentum=0.3,
            fragments=None,
            membership=elastic_of(args),
            replica_size=args.ranks,
        )
    elif args.shard:
        method = DiLoCoStrategy(sync_every=SYNC_EVERY, membership=elastic_of(args))
        strategy = LocoModelParallelStrategy(method, data_parallel_size=args.ranks)
    else:
        strategy = DiLoCoStrategy(
            sync_every=SYNC_EVERY, membership=elastic_of(args), replica_size=args.ranks
        )
    set_environment_of_rank(args)
    trainer: Trainer = quiet_trainer(
        strategy=strategy,
        devices=args.ranks,
        max_steps=args.max_steps,
        callbacks=[RoundLog(args.log, 0.03), SaveOften(folder)],
        default_root_dir=folder,
    )

    def is_time() -> bool:
        return strategy.engine.worker.round_index >= args.fail_in

    loader = DataLoader(Numbered(), batch_size=2, shuffle=True)
    with failing_at(args.fail_at, is_time, die) if args.fail_at else nullcontext():
        trainer.fit(ShardedModel() if args.shard else Model(), loader, ckpt_path=args.resume)
