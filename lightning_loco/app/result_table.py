"""The report of a finished run: a table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.strategies.loco import RoundStrategy
from lightning_loco.strategies.model_parallel import ShardedWorkers
from lightning_loco.strategies.summary import bytes_of_ddp
from lightning_loco.strategies.worker_strategy import WorkerStrategy
from lightning_loco.topology import as_topology


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Metrics of a run; None where nothing was measured.

    Attributes:
        algorithm: Name of the algorithm.
        topology: Name of the topology; None for algorithms without one.
        num_workers: Workers; if they join and leave, in the last round.
        val_loss: Validation loss of the final model.
        is_per_byte: Whether the loss is in nats per byte, as with ``ByteTextData``.
        tokens: Bytes trained on, all workers together.
        rounds: Exchanges between workers.
        bytes_sent: Bytes that all ranks of a worker sent, mean over the workers.
        bytes_saved: Bytes that compression has saved, mean over the workers.
        wait_s: Seconds that a rank was blocked in exchanges, mean over the ranks.
        train_s: Seconds from the first local step to the last, with validation and checkpoints.
        consensus_distance: Root mean square distance of the workers' parameters to their mean, as
            measured last.
    """

    algorithm: str
    topology: str | None
    num_workers: int
    val_loss: float | None = None
    is_per_byte: bool = False
    tokens: int | None = None
    rounds: int | None = None
    bytes_sent: int | None = None
    bytes_saved: int | None = None
    wait_s: float | None = None
    train_s: float | None = None
    consensus_distance: float | None = None

    def table(self) -> str:
        """Format one aligned line per metric."""
        lines = {
            "algorithm": self.algorithm,
            "topology": self.topology or "-",
            "workers": str(self.num_workers),
            "validation loss": self._loss(),
            "trained on": "-" if self.tokens is None else f"{self.tokens:,} bytes",
            "rounds": _number(self.rounds, ",d"),
            "sent per worker": self._sent(),
            "waited per worker": "-" if self.wait_s is None else format_seconds(self.wait_s),
            "training time": "-" if self.train_s is None else format_seconds(self.train_s),
            "consensus distance": _number(self.consensus_distance, ".3g"),
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())

    def _loss(self) -> str:
        if self.val_loss is None:
            return "-"
        bits = f" nats per byte ({self.val_loss / math.log(2):.3f} bits)"
        return f"{self.val_loss:.4f}{bits if self.is_per_byte else ''}"

    def _sent(self) -> str:
        if self.bytes_sent is None:
            return "-"
        if not self.bytes_saved:
            return format_bytes(self.bytes_sent)
        whole = self.bytes_sent + self.bytes_saved
        sent, part = format_bytes(self.bytes_sent), self.bytes_sent / whole
        return f"{sent}, {part:.1%} of {format_bytes(whole)} without compression"

    def write(self, folder: Path) -> None:
        """Write ``report.txt`` (the table) and ``report.json`` (the metrics)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(self.table() + "\n", encoding="utf-8")
        (folder / "report.json").write_text(
            json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8"
        )


def measure(
    trainer: Trainer, model: LightningModule, data: LightningDataModule, train_s: float
) -> RunReport:
    """Collect the metrics of a finished fit from all workers; every rank must call it.

    With ``ByteTextData`` the trained bytes are counted. ``train_s`` is the duration of the
    training.
    """
    strategy, steps = trainer.strategy, trainer.global_step
    report = RunReport(
        algorithm=type(strategy).__name__.removesuffix("Strategy"),
        topology=None,
        num_workers=trainer.world_size,
        is_per_byte=isinstance(data, ByteTextData),
    )
    step_bytes = None
    if isinstance(data, ByteTextData):
        step_bytes = data.batch_size * data.context * trainer.accumulate_grad_batches
    if not isinstance(strategy, WorkerStrategy):
        num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        return replace(
            report,
            tokens=step_bytes and steps * trainer.world_size * step_bytes,
            rounds=steps,
            bytes_sent=bytes_of_ddp(trainer.world_size, num_bytes, steps),
            train_s=train_s,
            consensus_distance=0.0,
        )
    if isinstance(strategy, RoundStrategy) and strategy.settings.topology is not None:
        report = replace(report, topology=as_topology(strategy.settings.topology).name)
    if trainer.world_size > 1 and not torch.distributed.is_initialized():
        return report  # a server rank, or the workers were other processes (spawn)
    statistics = strategy.statistics
    mine = [steps, statistics.bytes_sent, statistics.bytes_saved, statistics.wait_s]
    own = torch.tensor(mine, dtype=torch.float64, device=strategy.root_device)
    totals = strategy.reduce(own, reduce_op="sum").tolist()
    total_steps, total_bytes, total_saved, total_wait_s = totals
    if isinstance(strategy, ShardedWorkers):
        total_steps /= strategy.tensor_parallel_size  # these ranks read the same data
        report = replace(report, algorithm=type(strategy.settings.algorithm).__name__)
    is_elastic = statistics.members is not None  # the steps of other members are not known
    return replace(
        report,
        num_workers=statistics.members or strategy.num_workers,
        tokens=None if is_elastic else step_bytes and round(total_steps) * step_bytes,
        rounds=statistics.rounds,
        bytes_sent=round(total_bytes / strategy.num_workers),
        bytes_saved=round(total_saved / strategy.num_workers),
        wait_s=total_wait_s / trainer.world_size,
        train_s=train_s,
        consensus_distance=statistics.consensus_distance,
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
