"""PeerMonitor: logs the outcomes of fetches from peers."""

from __future__ import annotations

import statistics

from lightning_loco.callbacks.monitor import RoundMonitor
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.strategies.base import EngineStrategy


class PeerMonitor(RoundMonitor):
    """Log the fetches of this worker, with ``PairwiseGossipStrategy``.

    Counts since the start: ``loco/fetches`` (successful ones), ``loco/fetch_timeouts``,
    ``loco/fetches_refused``, ``loco/fetches_not_finite`` (NaN or infinity, or an implausible clock
    or loss), ``loco/fetches_too_far`` (see ``max_peer_distance``) and ``loco/malformed`` (dropped
    messages). Of the last blends: ``loco/blend_factor`` (median) and ``loco/peer_staleness_p10``,
    ``_p50``, ``_p90`` (percentiles of how many local steps the peers' clocks were behind). Of the
    peers: ``loco/peer_score_min`` in [10, 1000], which is low if a peer fails often.

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
