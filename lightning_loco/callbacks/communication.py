"""CommunicationMonitor: bytes, seconds and rounds."""

from __future__ import annotations

import math

import lightning.pytorch as pl

from lightning_loco.callbacks.monitor import RoundMonitor
from lightning_loco.engine import Engine
from lightning_loco.strategies import RemoteOptimizerStrategy
from lightning_loco.strategies.base import EngineStrategy


class CommunicationMonitor(RoundMonitor):
    """Log what communication has cost worker 0 so far.

    Metrics: ``loco/round``, ``loco/bytes_sent`` (payload bytes since the start), ``loco/wait_s``
    (seconds blocked since the start), ``loco/staleness`` (rounds), ``loco/outer_grad_norm`` (of the
    last round) and ``loco/train_loss_mean`` (over the workers, at the last round). With a remote
    optimizer a round is a step, and only the first three move. Where workers come and go there are
    ``loco/members`` (of the last round) and ``loco/repaired`` (members that had drifted), too; an
    outer learning rate that changes is ``loco/outer_lr``, and local steps between rounds that
    change are ``loco/sync_every``; with ``link=...`` there is ``loco/emulated_s`` (seconds that
    messages were under way on the link, waited for or hidden).

    Args:
        prog_bar: Show them in the progress bar, too.

    Example::

        Trainer(strategy=DiLoCoStrategy(), callbacks=[CommunicationMonitor()])
    """

    strategies = (EngineStrategy, RemoteOptimizerStrategy)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the engine to measure the outer gradient."""
        super().on_fit_start(trainer, pl_module)
        strategy = trainer.strategy
        if isinstance(strategy, EngineStrategy) and isinstance(strategy.engine, Engine):
            strategy.engine.measure_outer_gradient = True

    def metrics(self, strategy: EngineStrategy | RemoteOptimizerStrategy) -> dict[str, float]:
        """Rounds, bytes, waiting and staleness of this worker so far; losses of all workers."""
        statistics = strategy.statistics
        metrics = {
            "loco/round": float(statistics.rounds),
            "loco/bytes_sent": float(statistics.bytes_sent),
            "loco/wait_s": statistics.wait_s,
            "loco/staleness": float(statistics.staleness),
        }
        if statistics.outer_grad_norm is not None:
            metrics["loco/outer_grad_norm"] = statistics.outer_grad_norm
        if statistics.members is not None:
            metrics["loco/members"] = float(statistics.members)
            metrics["loco/repaired"] = float(statistics.repaired)
        if isinstance(engine := getattr(strategy, "engine", None), Engine):
            own = engine.settings.algorithm.metrics(engine.fragments[0].memory.state)
            own |= engine.settings.schedule.metrics(engine.worker.round_index)
            metrics |= {f"loco/{name}": value for name, value in own.items()}
        if statistics.emulated_s is not None:
            metrics["loco/emulated_s"] = statistics.emulated_s
        known = [loss for loss in statistics.losses if math.isfinite(loss)]
        if known:
            metrics["loco/train_loss_mean"] = sum(known) / len(known)
        return metrics
