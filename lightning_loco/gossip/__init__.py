"""Parameters of peers, read one-sidedly: nobody waits for a peer that is slow, late or dead.

Words: a worker's *peers* are the workers that it may read from. A *node* is a worker that serves
and reads; *nodes* are all workers of a user's list, this one among them. A worker *publishes* a
*snapshot* of its parameters, with a *tag* that holds their *clock* (local steps, blended like the
parameters; not the time) and loss. It *fetches* that of one peer, whole, and *blends* it in.
"""

from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.node import PeerNode, PeerStatistics
from lightning_loco.gossip.nodes_file import NodeSettings, read_nodes
from lightning_loco.gossip.peer_selection import (
    Directory,
    NodeDirectory,
    Peer,
    StoreDirectory,
    address_towards,
)

__all__ = [
    "Directory",
    "NodeDirectory",
    "NodeSettings",
    "PairwiseEngine",
    "Peer",
    "PeerNode",
    "PeerStatistics",
    "Received",
    "StoreDirectory",
    "address_towards",
    "read_nodes",
]
