"""PeerMonitor: how fetching from peers goes."""

from __future__ import annotations

import statistics

from lightning_loco.callbacks.monitor import RoundMonitor
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.strategies.base import EngineStrategy


class PeerMonitor(RoundMonitor):
    """Log what this worker has pulled from its peers, with ``PairwiseGossipStrategy``.

    Metrics, counted since the start: ``loco/fetches`` (that brought parameters),
    ``loco/fetch_timeouts``, ``loco/fetches_refused``, ``loco/fetches_not_finite`` (NaN or infinity,
    or a clock or loss that no worker has), ``loco/fetches_too_far`` (see ``max_peer_distance``),
    ``loco/malformed`` (messages dropped). Of the last blends: ``loco/blend_factor`` (median) and
    ``loco/peer_staleness_p10``, ``_p50``, ``_p90`` (by how many local steps the peers' clocks were
    behind). Of the peers: ``loco/peer_score_min`` in [10, 1000], the lower the less often a peer
    has answered.

    Args:
        prog_bar: Show them in the progress bar, too.

    Example::

        Trainer(strategy=PairwiseGossipStrategy(), callbacks=[PeerMonitor()])
    """

    def news(self, strategy: EngineStrategy) -> object:
        """The figures themselves: a fetch that fails makes no round."""
        return self.metrics(strategy)

    def metrics(self, strategy: EngineStrategy) -> dict[str, float]:
        """Fetches of this worker so far, and how old and how useful what they brought was."""
        engine = strategy.engine
        if not isinstance(engine, PairwiseEngine):
            return {}
        counts = engine.node.statistics
        metrics = {
            "loco/fetches": float(counts.fetches),
            "loco/fetch_timeouts": float(counts.timeouts),
            "loco/fetches_refused": float(counts.refused),
            "loco/fetches_not_finite": float(counts.not_finite),
            "loco/fetches_too_far": float(counts.too_far),
            "loco/malformed": float(counts.malformed),
        }
        if counts.scores:
            metrics["loco/peer_score_min"] = float(min(counts.scores.values()))
        if engine.factors:
            metrics["loco/blend_factor"] = statistics.median(engine.factors)
        if len(engine.stalenesses) > 1:
            tenths = statistics.quantiles(engine.stalenesses, n=10, method="inclusive")
            for percent in (10, 50, 90):
                metrics[f"loco/peer_staleness_p{percent}"] = tenths[percent // 10 - 1]
        return metrics
