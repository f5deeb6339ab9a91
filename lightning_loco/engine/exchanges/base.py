"""How messages move: what every exchange must offer, and which one an algorithm gets.

Every exchange has two faces that must agree: ``start(...).wait()`` between processes, and
``simulate(...)`` on the list of all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.compression import Compression
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.buckets import Bucket, Handle
from lightning_loco.engine.exchanges.all_reduce import MeanExchange
from lightning_loco.engine.exchanges.compressed import CompressedMean
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.fault_points import reach
from lightning_loco.topology import Topology


class Exchange(Protocol):
    """One way of moving messages.

    Attributes:
        is_weighted: Whether what arrives is a sum, to be divided by the total weight of the
            workers; one of weight 0 sends zeros then.
        can_carry_status: Whether numbers behind the message are summed over all workers.
    """

    is_weighted: bool
    can_carry_status: bool

    def start(self, bucket: Bucket, round_index: int) -> Handle:
        """Send a bucket; its memory must stay untouched until :meth:`Handle.wait` has returned."""

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """What each worker would receive, given all messages in order of the workers.

        What is lost of them is left in their place, if it is fed back.
        """


def send(exchange: Exchange, bucket: Bucket, round_index: int) -> Handle:
    """Start an exchange; the handle is what to wait for."""
    reach("before sending")
    handle = exchange.start(bucket, round_index)
    reach("after sending")
    return handle


def wait_for(handle: Handle) -> Tensor:
    """Return what an exchange has received; blocks until it is complete."""
    received = handle.wait()
    reach("after receiving")
    return received


def make_exchange(
    algorithm: Algorithm,
    group: WorkerGroup,
    statistics: Statistics,
    topology: Topology | None,
    compression: Compression | None = None,
    is_overlapped: bool = False,
) -> Exchange:
    """The exchange that the algorithm names; ValueError if it has none that makes rounds.

    Args:
        algorithm: Prepared.
        group: The workers.
        statistics: Where bytes and seconds are counted.
        topology: Who exchanges with whom, for gossip.
        compression: How messages are written. Default: as they are.
        stays: Whether local steps are made while rounds are under way.
    """
    name = type(algorithm).__name__
    if algorithm.exchange == "pull":
        raise ValueError(
            f"{name} pulls from one peer at a time and makes no rounds. Use PairwiseEngine, or "
            "PairwiseGossipStrategy (algorithm=pairwise_gossip)."
        )
    if algorithm.exchange == "mean":
        if compression is None:
            return MeanExchange(group, statistics)
        return CompressedMean(group, statistics, compression, is_overlapped)
    if topology is None:
        raise ValueError(f"{name} needs a topology to know its neighbours.")
    codec = None if compression is None else compression.codec
    return NeighborExchange(group, statistics, topology, codec)
