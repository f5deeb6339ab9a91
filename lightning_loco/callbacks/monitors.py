"""Monitors: callbacks that log metrics of rounds, and of fetches from peers."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from statistics import fmean, median, quantiles
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.algorithms.outer_momentum import USUAL_STEPS, momentum_for, outer_step
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.model.participant import LocalParticipant, Participant
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.lightning_compat import is_logging_step
from lightning_loco.strategies.summary import errors_as_warnings, round_metrics
from lightning_loco.strategies.worker_strategy import WorkerStrategy

WATCHED_ROUNDS = 10


class RoundMonitor(pl.Callback):
    """Logs metrics after each round, at most every ``log_every_n_steps`` steps.

    Args:
        prog_bar: Show the metrics in the progress bar, too.

    Attributes:
        strategies: Classes of strategies that have the metrics.
    """

    strategies: tuple[type[Any], ...] = (EngineStrategy,)

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._logged: object = 0

    @abstractmethod
    def metrics(self, strategy: Any) -> dict[str, float]:
        """Return the names and values to log, of one of the :attr:`strategies`."""

    def news(self, strategy: Any) -> object:
        """Return a value that changes when there is something new to log: the number of rounds."""
        return strategy.statistics.rounds

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the monitor; print a note if the strategy has no such metrics."""
        self._logged = 0
        if not isinstance(trainer.strategy, self.strategies):
            rank_zero_info(
                f"{type(self).__name__} logs nothing with {type(trainer.strategy).__name__}, which "
                "has no such metrics."
            )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log if there is something new; no communication."""
        strategy: Any = trainer.strategy
        if not isinstance(strategy, self.strategies):
            return
        if not (self.prog_bar or is_logging_step(trainer)):
            return
        with errors_as_warnings(f"{type(self).__name__} cannot log its metrics."):
            news = self.news(strategy)
            if news == self._logged:
                return
            self._logged = news
            pl_module.log_dict(
                self.metrics(strategy), prog_bar=self.prog_bar, on_step=True, on_epoch=False
            )


class CommunicationMonitor(RoundMonitor):
    """Log the bytes and seconds of worker 0's communication so far.

    In a worker of several ranks its first rank is counted, without the gradients that DDP averages
    within the worker.

    Metrics: ``loco/round``, ``loco/bytes_sent`` (payload bytes since the start), ``loco/wait_s``
    (seconds blocked since the start), ``loco/staleness`` (rounds), ``loco/outer_grad_norm`` (of the
    last round), ``loco/persistence`` (how much the last two pseudo-gradients point the same way),
    ``loco/train_loss_mean`` (over the workers, at the last round) and ``loco/participation`` (share
    of the workers with weight in that round). The time since the start is divided into
    ``loco/goodput``, local steps whose progress is not lost, and ``loco/waiting``,
    ``loco/joining``, ``loco/lost`` and ``loco/restarting``: shares, see
    :class:`~lightning_loco.simulation.Goodput`. With a remote optimizer a round is a step, and only
    rounds, bytes, seconds and shares change. If workers join and leave, also ``loco/members`` (of
    the last round) and ``loco/repaired`` (members that had drifted); if they change,
    ``loco/outer_lr``, ``loco/outer_momentum`` and ``loco/sync_every``.

    With DiLoCo it warns once if the outer steps of ten rounds are too long or too short for how
    much pseudo-gradients persist.

    Args:
        prog_bar: Show them in the progress bar, too.

    Example::

        Trainer(strategy=DiLoCoStrategy(), callbacks=[CommunicationMonitor()])
    """

    strategies = (WorkerStrategy,)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make rounds measure the outer gradient."""
        super().on_fit_start(trainer, pl_module)
        self._outer_steps: deque[float] = deque(maxlen=WATCHED_ROUNDS)
        self._watched, self._has_warned = 0, False
        if (participant := participant_of(trainer)) is not None:
            participant.measure_outer_gradient = True

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        """Log if there is something new, and watch the outer steps; no communication."""
        super().on_train_batch_end(trainer, *others)
        participant = participant_of(trainer)
        if isinstance(participant, LocalParticipant) and not self._has_warned:
            text = ""
            with errors_as_warnings(f"{type(self).__name__} cannot watch the outer steps."):
                text = self._advice_on_outer_steps(participant)
            if text:
                self._has_warned = True
                rank_zero_warn(text)

    def metrics(self, strategy: WorkerStrategy) -> dict[str, float]:
        """Return rounds, bytes, waiting and staleness of this worker; the mean loss of all."""
        return round_metrics(strategy.statistics, strategy.participant)

    def _advice_on_outer_steps(self, participant: LocalParticipant) -> str:
        """What to change if the outer steps of the last rounds are too long or too short."""
        algorithm, statistics = participant.settings.algorithm, participant.statistics
        if statistics.rounds == self._watched or statistics.persistence is None:
            return ""
        self._watched = statistics.rounds
        if not isinstance(algorithm, DiLoCo) or algorithm.outer_optimizer is not None:
            return ""
        outer_lr: Any = algorithm.outer_lr
        momentum: Any = algorithm.outer_momentum
        persistence = statistics.persistence
        if callable(outer_lr) or momentum == "auto":
            changing = participant.metrics()
            outer_lr = changing.get("outer_lr", outer_lr)
            momentum = changing.get("outer_momentum", momentum)
        self._outer_steps.append(outer_step(outer_lr, momentum, persistence))
        mean, (shortest, longest) = fmean(self._outer_steps), USUAL_STEPS
        is_long_enough = mean >= shortest or callable(algorithm.outer_lr)  # which may end low
        if len(self._outer_steps) < WATCHED_ROUNDS or (is_long_enough and mean <= longest):
            return ""
        return (
            f"In the last {WATCHED_ROUNDS} rounds outer_lr / (1 - outer_momentum * persistence) "
            f"was {mean:.2g}, with outer_lr={outer_lr:g}, outer_momentum={momentum:g} and a "
            f"persistence of {persistence:.2f}. Outside {shortest} to {longest} training is likely "
            'to be worse. Use outer_lr=0.7 with outer_momentum="auto" or '
            f"{momentum_for(0.7, persistence):.1f}."
        )


class ConsensusMonitor(RoundMonitor):
    r"""Log the consensus distance right before rounds, when it is largest.

    .. math:: \sqrt{\tfrac{1}{N} \sum_i \lVert \theta^i - \bar\theta \rVert^2}

    Metric: ``loco/consensus_distance``. It costs one small all-reduce in each measured round, of at
    most ``max_elements`` parameters as float64; for larger models it is an estimate from every k-th
    parameter, others in each round. On the demo the estimate from 8192 is within 1 %.

    Args:
        every_n_rounds: Measure in every n-th round, at least 1.
        max_elements: Number of parameters in the sample, at most.
        prog_bar: Show it in the progress bar, too.

    Raises:
        ValueError: If a number is smaller than 1.
        TypeError: If a number is not an integer.

    Example::

        Trainer(strategy=GASLoCStrategy(), callbacks=[ConsensusMonitor(every_n_rounds=10)])
    """

    def __init__(
        self, every_n_rounds: int = 1, max_elements: int = 8192, prog_bar: bool = False
    ) -> None:
        for name, value in (("every_n_rounds", every_n_rounds), ("max_elements", max_elements)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        super().__init__(prog_bar)
        self.every_n_rounds = every_n_rounds
        self.max_elements = max_elements

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make rounds measure; the same on all workers."""
        super().on_fit_start(trainer, pl_module)
        if (participant := participant_of(trainer)) is not None:
            participant.consensus_every = self.every_n_rounds
            participant.consensus_elements = self.max_elements

    def metrics(self, strategy: EngineStrategy) -> dict[str, float]:
        """Return the distance that was measured last."""
        distance = strategy.statistics.consensus_distance
        return {} if distance is None else {"loco/consensus_distance": distance}


class PeerMonitor(RoundMonitor):
    """Log the fetches of this worker, with ``PairwiseGossipStrategy``.

    Counts since the start: ``loco/fetches`` (successful ones), ``loco/fetch_timeouts``,
    ``loco/fetches_refused``, ``loco/fetches_not_finite`` (NaN or infinity, or an implausible clock
    or loss), ``loco/fetches_too_large`` (their norm) and ``loco/malformed`` (dropped
    messages). Of the last blends: ``loco/blend_factor`` (median) and ``loco/peer_staleness_p10``,
    ``_p50``, ``_p90`` (percentiles of how many local steps the peers' clocks were behind). Of the
    peers: ``loco/peer_score_min`` in [10, 1000], which is low if a peer fails often. Of a worker of
    several ranks only the first one, which fetches, logs them.

    Args:
        prog_bar: Also show the metrics in the progress bar.

    Example::

        Trainer(strategy=PairwiseGossipStrategy(), callbacks=[PeerMonitor()])
    """

    def news(self, strategy: EngineStrategy) -> object:
        """Return the metrics, because they also change with a failed fetch, which is no round."""
        return self.metrics(strategy)

    def metrics(self, strategy: EngineStrategy) -> dict[str, float]:
        """Return the metrics of this worker."""
        engine = strategy.engine
        if not isinstance(engine, PairwiseEngine) or strategy.place > 0:
            return {}
        counts = engine.node.statistics
        metrics = {
            "loco/fetches": float(counts.fetches),
            "loco/fetch_timeouts": float(counts.timeouts),
            "loco/fetches_refused": float(counts.refused),
            "loco/fetches_not_finite": float(counts.not_finite),
            "loco/fetches_too_large": float(counts.too_large),
            "loco/malformed": float(counts.malformed),
        }
        if counts.scores:
            metrics["loco/peer_score_min"] = float(min(counts.scores.values()))
        if engine.factors:
            metrics["loco/blend_factor"] = median(engine.factors)
        if len(engine.stalenesses) > 1:
            tenths = quantiles(engine.stalenesses, n=10, method="inclusive")
            for percent in (10, 50, 90):
                metrics[f"loco/peer_staleness_p{percent}"] = tenths[percent // 10 - 1]
        return metrics


def participant_of(trainer: pl.Trainer) -> Participant | None:
    """Return the participant of this rank during ``fit``; None with other strategies."""
    strategy = trainer.strategy
    return strategy.participant if isinstance(strategy, WorkerStrategy) else None
