"""Nodes, servers and peers for tests, in this process and in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip import NodeListDiscovery, Peer, PeerNode, Received
from lightning_loco.gossip.fetcher import FetchingThread
from lightning_loco.gossip.protocol import (
    PARAMETERS,
    ModelId,
    ReplyHeader,
    WireFormat,
    pack_reply,
    parse_request,
)
from lightning_loco.gossip.snapshot_server import SnapshotServer
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.transport import JobCertificate, Request, Server
from tests.harness.limits import HARNESS_S, wait_until
from tests.harness.pool import PRELOADED
from tests.harness.programs import free_ports
from tests.harness.sockets import HOST

CHECKSUM = 0x1122334455667788
TAG = Tag(1, 1)
FORMAT = WireFormat(CHECKSUM, 1000, torch.float32)
DPWA: dict[str, Any] = {"fetch_probability": 1.0, "factor": 0.5, "keep_progress": False}
"""The settings of dpwa: a fetch in each step, and the mean of both models."""

_processes = multiprocessing.get_context("forkserver")


def peers(count: int, letter: str = "p") -> list[Peer]:
    """Return ``count`` nodes named p0, p1, ... with free ports on this machine."""
    return [Peer(f"{letter}{index}", HOST, port) for index, port in enumerate(free_ports(count))]


def make_node(nodes: list[Peer], index: int, numel: int = 1000, **settings: Any) -> PeerNode:
    """Open node number ``index`` of a list."""
    defaults = {"schema_checksum": CHECKSUM, "fetch_timeout_s": 5.0, "seed": index}
    discovery = NodeListDiscovery(nodes, nodes[index].name)
    return PeerNode(numel, torch.float32, discovery, **{**defaults, **settings})


@contextlib.contextmanager
def two_nodes(numel: int = 1000, **settings: Any) -> Iterator[tuple[PeerNode, PeerNode]]:
    """Open two nodes in this process that are peers; they are closed at the end."""
    nodes = peers(2)
    with contextlib.ExitStack() as stack:
        opened = []
        for index in range(2):
            opened.append(make_node(nodes, index, numel, **settings))
            stack.callback(opened[-1].close)
        yield opened[0], opened[1]


def fetch(node: PeerNode) -> Received | None:
    """Start a fetch and wait for its result."""
    node.start_fetch()
    return node.wait()


def fetch_until(
    node: PeerNode, wanted: Callable[[Received | None], bool], limit_s: float = 20.0
) -> list[float]:
    """Fetch until the result is as expected; return the duration of every wait in seconds."""
    waits = []
    deadline = time.monotonic() + limit_s
    while True:
        node.start_fetch()
        started = time.monotonic()
        received = node.wait()
        waits.append(time.monotonic() - started)
        if wanted(received):
            return waits
        assert time.monotonic() < deadline, f"{received} after {limit_s} s, {node.statistics}"
        time.sleep(0.01)


def wait_until_ended(node: PeerNode | FetchingThread) -> None:
    """Wait until the last fetch is counted, possibly after :meth:`PeerNode.wait` has returned."""
    wait_until(lambda: node.has_ended, "the fetch has not ended")


@contextlib.contextmanager
def serving(
    peer: Peer,
    value: float | None = None,
    wire_format: WireFormat = FORMAT,
    certificate: JobCertificate | None = None,
) -> Iterator[tuple[SnapshotServer, Snapshots]]:
    """Run a snapshot server at the port of a peer, with a vector of one value or nothing yet."""
    snapshots = Snapshots(wire_format)
    if value is not None:
        snapshots.publish(torch.full((wire_format.numel,), value), Tag(value, value))
    server = SnapshotServer(
        wire_format,
        snapshots,
        num_peers=1,
        timeout_s=HARNESS_S,
        host=peer.host,
        port=peer.port,
        certificate=certificate,
    )
    server.start()
    try:
        yield server, snapshots
    finally:
        server.close()


@contextlib.contextmanager
def silent(peer: Peer) -> Iterator[socket.socket]:
    """Listen on the port of a peer and never send anything."""
    with socket.create_server((peer.host, peer.port)) as server:
        yield server


Replying = Callable[[ModelId], tuple[bytes, bytes]]
"""Called with a request; returns the header and the body of the reply."""


@contextlib.contextmanager
def replying(port: int, make_reply: Replying) -> Iterator[None]:
    """Run a server that sends the test's reply to every request."""

    def reply(request: Request) -> None:
        request.reply(*make_reply(parse_request(request.header)))

    server = Server(reply, port=port)
    server.start()
    try:
        yield
    finally:
        server.close()


def valid_reply(
    requested: ModelId,
    num_bytes: int,
    value: float,
    tag: Tag = TAG,
    dtype: torch.dtype = torch.float32,
) -> tuple[bytes, bytes]:
    """Return the reply of a real server whose parameters all have one value."""
    body = torch.full((num_bytes // dtype.itemsize,), value, dtype=dtype).numpy().tobytes()
    return pack_reply(ReplyHeader(PARAMETERS, requested, tag)), body


class NodeProcess:
    """A node in another process, which has published a vector with a single value."""

    def __init__(self, nodes: list[Peer], index: int, value: float, numel: int = 1000) -> None:
        _processes.set_forkserver_preload(PRELOADED)
        parent, child = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(child, nodes, index, value, numel), daemon=True
        )
        self._process.start()
        child.close()
        assert parent.poll(60), "the other process has not started"
        assert parent.recv() == "serving"
        self._connection = parent

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(
    connection: Connection[str, str], nodes: list[Peer], index: int, value: float, numel: int
) -> None:
    node = make_node(nodes, index, numel)
    node.publish(torch.full((numel,), value), Tag(value, value))
    connection.send("serving")
    while True:
        time.sleep(60)
