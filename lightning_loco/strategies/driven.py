"""What a strategy asks of the engine that drives its worker, and says of it."""

from __future__ import annotations

from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.comm import Statistics, Worker
from lightning_loco.schedules import Schedule


class Engine(Protocol):
    """What drives one worker: counts its local steps and makes exchanges when they are due."""

    worker: Worker
    settings: Any
    statistics: Statistics

    @property
    def is_due(self) -> bool:
        """Whether there is something to do after the step that was counted last."""

    def count_step(self) -> None:
        """Count one local step."""

    def make_round(self) -> None:
        """Do what is due."""

    def finish(self) -> None:
        """Leave the consensus in the model, on all workers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on exactly."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""

    def close(self) -> None:
        """Let go of process groups and threads."""


def tell_of_link(engine: Engine) -> None:
    """One line about what an emulated link has cost this worker; nothing if there is none."""
    statistics, worker = engine.statistics, engine.worker
    if (under_way_s := statistics.emulated_s) is None:
        return
    waited_s, num_bytes = statistics.emulated_wait_s, statistics.emulated_bytes
    text = (
        f"On the link that is emulated {num_bytes:,} bytes were under way for {under_way_s:.1f} s: "
        f"{waited_s:.1f} s were waited for, {under_way_s - waited_s:.1f} s were hidden."
    )
    n, layout = worker.group.num_workers, worker.replica.layout
    of_ddp = 2 * (n - 1) * layout.numel * layout.dtype.itemsize * worker.steps / n
    if of_ddp:
        text += f" DDP would have sent {of_ddp:,.0f} bytes in {worker.steps} steps."
    rank_zero_info(text)


def describe(engine: Engine, schedule: Schedule | None) -> str:
    """One line about a run: its algorithm, workers, parameters and rounds, and where it starts."""
    worker, settings = engine.worker, engine.settings
    group, membership = worker.group, getattr(settings, "membership", None)
    workers = f"{group.num_workers} workers" if membership is None else "workers that come and go"
    rounds = "" if schedule is None else f"{schedule}, topology {settings.topology}, "
    return (
        f"{settings.algorithm} on {workers}, "
        f"{worker.replica.layout.numel:,} trainable parameters, {rounds}"
        f"start {worker.checksum:08x}."
    )
