"""How messages move between workers: all-reduce, compressed all-reduce, gather, neighbours."""

from __future__ import annotations

from lightning_loco.algorithms import Algorithm
from lightning_loco.algorithms.algorithm import has_own
from lightning_loco.compression import Compression
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.exchanges.compressed import CompressedAllReduce
from lightning_loco.engine.exchanges.exchange import Exchange
from lightning_loco.engine.exchanges.gather import Gather
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.topology import Topology


def make_exchange(
    algorithm: Algorithm,
    group: WorkerGroup,
    statistics: Statistics,
    topology: Topology | None,
    compression: Compression | None = None,
    is_overlapped: bool = False,
    carries_status: bool = False,
) -> Exchange:
    """Make the exchange that an algorithm names.

    Args:
        algorithm: Prepared.
        group: The workers.
        statistics: Where bytes and seconds are counted.
        topology: Who exchanges with whom, for gossip.
        compression: How messages are compressed. Default: not at all.
        is_overlapped: Whether local steps continue while rounds are pending.
        carries_status: Whether an all-reduce may carry statuses behind its first bucket.

    Raises:
        ValueError: If the algorithm has no rounds, or needs a topology.
    """
    name = type(algorithm).__name__
    if algorithm.exchange == "pull":
        raise ValueError(
            f"{name} pulls from one peer at a time and has no rounds. Use PairwiseEngine, or "
            "PairwiseGossipStrategy (algorithm=pairwise_gossip)."
        )
    if algorithm.exchange == "mean":
        if algorithm.gathers:
            return Gather(group, statistics)
        if compression is None:
            return AllReduce(group, statistics, carries_status, is_overlapped)
        sends_weights = has_own(algorithm, "weight")
        return CompressedAllReduce(group, statistics, compression, is_overlapped, sends_weights)
    if topology is None:
        raise ValueError(f"{name} needs a topology to know its neighbours.")
    codec = None if compression is None else compression.codec
    return NeighborExchange(group, statistics, topology, codec)
