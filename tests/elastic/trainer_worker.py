"""One rank of an elastic worker in a separate process: a fit with a learning rate schedule."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    CommunicationMonitor,
    DiLoCoStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.model.flat import local_tensor
from lightning_loco.strategies import lightning_compat
from tests.elastic.arguments import elastic_of, make_parser
from tests.elastic.worker import checksum
from tests.harness.small_model import TinyModule, quiet_trainer


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples with their index."""

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


class ShardedModel(Model):
    """The same, sharded by FSDP2."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class TensorModel(Model):
    """The same with tensor parallelism: all ranks of a worker need the same samples."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)


class RoundLog(Callback):
    """Logs every round and the samples used in it."""

    def __init__(self, path: Path, step_s: float) -> None:
        self._path = path
        self._step_s = step_s
        self._samples: list[int] = []
        self._round: int | None = None
        self._line: dict[str, Any] = {}

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._record(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        time.sleep(self._step_s)
        self._write(trainer)
        self._samples += batch[0].tolist()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._record(trainer)
        self._write(trainer)

    def _record(self, trainer: Any) -> None:
        """Record the line of the last round."""
        engine = trainer.strategy.engine
        before, self._round = self._round, engine.worker.round_index
        if before is None or self._round != before + 1:  # the last step may run two rounds
            return
        last = engine.exchange.last_round
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


MODELS = {None: Model, "data": ShardedModel, "tensor": TensorModel}


class OverwriteWeights(Callback):
    """Overwrites the weights at the start of an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self._epoch:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()


def set_environment_of_rank(args: argparse.Namespace) -> None:
    """Set the variables that torchrun sets for a rank of a worker with several ranks."""
    if args.ranks == 1:
        return
    rank = str(args.index % args.ranks)
    os.environ.update(
        {
            "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(args.port),
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_WORLD_SIZE": str(args.ranks),
        }
    )


def main(arguments: list[str]) -> None:
    """Train as given by the command line."""
    parser = make_parser()
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--num-loaders", type=int, default=0)
    parser.add_argument("--epoch-steps", type=int)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--late-s", type=float, default=0, help="more for each place but the first")
    parser.add_argument("--resume")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--dev-run", action="store_true")
    parser.add_argument("--writes-at", type=int, default=-1)
    parser.add_argument("--shard", choices=MODELS, help="how, over the ranks of the worker")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored

    torch.manual_seed(args.index)
    kind: Callable[..., LocoStrategy]
    kind = DiLoCoStrategy
    if args.overlap:
        kind = functools.partial(AsyncDiLoCoStrategy, fragments=None)
    if args.stream:
        kind = functools.partial(StreamingDiLoCoStrategy, fragments=2, delay=1)
    strategy: LocoStrategy | LocoModelParallelStrategy
    if args.shard:
        method = kind(sync_every=4, membership=elastic_of(args))
        sizes = (args.ranks, 1) if args.shard == "data" else (1, args.ranks)
        strategy = LocoModelParallelStrategy(method, *sizes)
    else:
        strategy = kind(sync_every=4, membership=elastic_of(args), replica_size=args.ranks)
    set_environment_of_rank(args)
    trainer: Trainer = quiet_trainer(
        strategy=strategy,
        devices=args.ranks,
        max_steps=args.max_steps,
        limit_train_batches=args.epoch_steps,
        callbacks=[
            CommunicationMonitor(),
            OverwriteWeights(args.writes_at),
            RoundLog(args.log, args.step_s + args.late_s * (args.index % args.ranks)),
        ],
        log_every_n_steps=1,
        fast_dev_run=args.max_steps if args.dev_run else False,
        default_root_dir=args.log.with_suffix(""),
    )
    loader = DataLoader(
        Numbered(args.samples), batch_size=2, shuffle=True, num_workers=args.num_loaders
    )
    model = MODELS[args.shard]()
    trainer.fit(model, loader, ckpt_path=args.resume)
    held = torch.cat([local_tensor(p).detach().flatten() for p in model.parameters()])
    end = {"model": held.tolist(), "rounds": strategy.statistics.rounds}
    args.log.with_suffix(".end").write_text(json.dumps(end))
