"""From the settings to a node that serves and reads: where its peers are, and at which port."""

from __future__ import annotations

import os
import socket

from lightning_loco.comm.checks import schema_checksum
from lightning_loco.comm.devices import has_streams
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.peers.directory import (
    Directory,
    NodeDirectory,
    Peer,
    StoreDirectory,
    address_towards,
)
from lightning_loco.peers.node import PeerNode
from lightning_loco.peers.settings import PairwiseSettings
from lightning_loco.peers.slow_reader import fetch_seconds

_ANY_FREE_PORT = 0


def open_node(
    settings: PairwiseSettings, group: WorkerGroup, layout: FlatLayout, seed: int
) -> PeerNode:
    """Begin to serve this worker's parameters and to look for its peers.

    Its peers are the other nodes of the settings or, without any, the other ranks of the job. All
    of these must call it.

    Args:
        settings: Checked.
        group: The ranks of this job.
        layout: What travels.
        seed: Of the choice of peers; give each worker its own.

    Raises:
        RuntimeError: If the port of this node is taken.
    """
    return PeerNode(
        layout.numel,
        layout.dtype,
        open_directory(settings, group),
        schema_checksum=schema_checksum(layout.schema()),
        compression=settings.codec,
        fetch_timeout_s=settings.fetch_timeout_s,
        max_peer_distance=settings.max_peer_distance,
        seed=seed,
        pinned=has_streams(layout.device),
        key_file=settings.key_file,
        port=None if settings.name is not None else _ANY_FREE_PORT,
        slow=fetch_seconds(settings, group),
    )


def open_directory(settings: PairwiseSettings, group: WorkerGroup) -> Directory:
    """Where to find the other nodes, the other ranks of the job, or nobody for a worker alone."""
    if settings.name is not None:
        return NodeDirectory(settings.peers, settings.name)
    if group.num_workers > 1:
        store = group.own_store("peers")
        return StoreDirectory(store, group.worker, group.num_workers, _own_host(group))
    return NodeDirectory([Peer("alone", "127.0.0.1", 1)], "alone")


def _own_host(group: WorkerGroup) -> str:
    """Where the other ranks of the job reach this one: loopback if all are on one machine."""
    names = group.gather_objects(socket.gethostname(), "the search for peers")
    if len(set(names)) == 1:
        return "127.0.0.1"
    return address_towards(os.environ.get("MASTER_ADDR", names[0]))
