"""Parameters of peers, read one-sidedly: nobody waits for a peer that is slow, late or dead."""

from lightning_loco.peers.counts import PeerStatistics
from lightning_loco.peers.directory import (
    Directory,
    NodeDirectory,
    Peer,
    StoreDirectory,
    address_towards,
)
from lightning_loco.peers.engine import PairwiseEngine
from lightning_loco.peers.keys import read_key_file, write_key_file
from lightning_loco.peers.node import PeerNode
from lightning_loco.peers.nodes_file import NodeSettings, read_nodes
from lightning_loco.peers.reader import Received

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
    "read_key_file",
    "read_nodes",
    "write_key_file",
]
