"""Pairwise gossip: workers read the parameters of random peers, without rounds.

A worker's *peers* are the workers that it may read from. A *node* is a worker that serves its own
parameters and reads parameters of others; *nodes* are all workers of a user's list.
A worker *publishes* *snapshots* of its parameters. Each snapshot has a *tag* with its *clock* and
the worker's loss; the clock counts local steps and is averaged like the parameters. A worker
*fetches* the latest snapshot of one peer at a time, and *blends* it into its own parameters. No
worker ever waits for a peer that is slow or dead.

:class:`PairwiseEngine` is the interface for training. From top to bottom: ``engine`` counts steps
and blends (``averaging``), ``node`` serves (``snapshot_server``, ``snapshots``) and fetches
(``fetcher``, ``peer_selection``), and ``protocol`` defines requests and replies.
"""

from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.node import PeerNode, PeerStatistics
from lightning_loco.gossip.nodes_file import NodeSettings, read_nodes
from lightning_loco.gossip.peer_selection import (
    NodeListDiscovery,
    Peer,
    PeerDiscovery,
    StoreDiscovery,
)
from lightning_loco.gossip.settings import PairwiseSettings

__all__ = [
    "NodeListDiscovery",
    "NodeSettings",
    "PairwiseEngine",
    "PairwiseSettings",
    "Peer",
    "PeerDiscovery",
    "PeerNode",
    "PeerStatistics",
    "Received",
    "StoreDiscovery",
    "read_nodes",
]
