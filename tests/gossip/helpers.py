"""Nodes on this machine, in this process and in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.gossip import NodeDirectory, Peer, PeerNode, Received
from lightning_loco.gossip.fetcher import FetchingThread
from lightning_loco.gossip.model import Model
from lightning_loco.gossip.protocol import (
    PARAMETERS,
    Answer,
    Content,
    pack_answer,
    parse_request,
)
from lightning_loco.gossip.server import SnapshotServer
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.transport import JobCertificate, Request, Server
from tests.limits import HARNESS_S
from tests.programs import free_ports
from tests.transport.helpers import HOST, wait_until

CHECKSUM = 0x1122334455667788
TAG = Tag(1, 1)
MODEL = Model(CHECKSUM, 1000, torch.float32)

_processes = multiprocessing.get_context("forkserver")


def peers(count: int, letter: str = "p") -> list[Peer]:
    """Names (p0, p1, ...) and addresses for so many nodes; their ports are free at present."""
    return [Peer(f"{letter}{index}", HOST, port) for index, port in enumerate(free_ports(count))]


def make_node(nodes: list[Peer], index: int, numel: int = 1000, **settings: Any) -> PeerNode:
    """Node number ``index`` of a list."""
    defaults = {"schema_checksum": CHECKSUM, "fetch_timeout_s": 5.0, "seed": index}
    directory = NodeDirectory(nodes, nodes[index].name)
    return PeerNode(numel, torch.float32, directory, **{**defaults, **settings})


@contextlib.contextmanager
def two_nodes(numel: int = 1000, **settings: Any) -> Iterator[tuple[PeerNode, PeerNode]]:
    """Two nodes in this process that know each other; closed in the end."""
    nodes = peers(2)
    with contextlib.ExitStack() as stack:
        made = []
        for index in range(2):
            made.append(make_node(nodes, index, numel, **settings))
            stack.callback(made[-1].close)
        yield made[0], made[1]


def fetch(node: PeerNode) -> Received | None:
    """One fetch from start to end."""
    node.start_fetch()
    return node.wait()


def fetch_until(
    node: PeerNode, wanted: Callable[[Received | None], bool], patience_s: float = 20.0
) -> list[float]:
    """Fetch until the result is as wanted; return the seconds of every wait."""
    waits = []
    deadline = time.monotonic() + patience_s
    while True:
        node.start_fetch()
        started = time.monotonic()
        received = node.wait()
        waits.append(time.monotonic() - started)
        if wanted(received):
            return waits
        assert time.monotonic() < deadline, f"{received} after {patience_s} s, {node.statistics}"
        time.sleep(0.01)


def wait_until_ended(node: PeerNode | FetchingThread) -> None:
    """Until the counts tell of the last fetch: a wait may end before it does."""
    wait_until(lambda: node.has_ended, "the fetch has not ended")


@contextlib.contextmanager
def serving(
    peer: Peer,
    value: float | None = None,
    model: Model = MODEL,
    certificate: JobCertificate | None = None,
) -> Iterator[tuple[SnapshotServer, Snapshots]]:
    """Somebody who serves at the port of a peer: a vector of one value, or nothing yet."""
    snapshots = Snapshots(model)
    if value is not None:
        snapshots.publish(torch.full((model.numel,), value), Tag(value, value))
    server = SnapshotServer(
        model,
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
    """Somebody who listens at the port of a peer, and never says anything."""
    with socket.create_server((peer.host, peer.port)) as server:
        yield server


Answering = Callable[[Content], tuple[bytes, bytes]]
"""What somebody who is not one of ours answers when asked: a note and a body."""


@contextlib.contextmanager
def answering(port: int, answer: Answering) -> Iterator[None]:
    """Somebody at a port who answers every request with what the test says."""

    def reply(request: Request) -> None:
        request.reply(*answer(parse_request(request.header)))

    server = Server(reply, port=port)
    server.start()
    try:
        yield
    finally:
        server.close()


def right_answer(
    asked: Content,
    num_bytes: int,
    value: float,
    tag: Tag = TAG,
    dtype: torch.dtype = torch.float32,
) -> tuple[bytes, bytes]:
    """What one of ours would answer that holds one value."""
    body = torch.full((num_bytes // dtype.itemsize,), value, dtype=dtype).numpy().tobytes()
    return pack_answer(Answer(PARAMETERS, asked, tag)), body


def peer_threads() -> list[str]:
    """Names of the threads of nodes."""
    kinds = ("loco-peer", "loco-server")
    return [t.name for t in threading.enumerate() if t.name.startswith(kinds)]


class NodeProcess:
    """A node in another process that has published a vector of one value."""

    def __init__(self, nodes: list[Peer], index: int, value: float, numel: int = 1000) -> None:
        _processes.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch"])
        ours, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(theirs, nodes, index, value, numel), daemon=True
        )
        self._process.start()
        theirs.close()
        assert ours.poll(60), "the other process has not started"
        assert ours.recv() == "serving"
        self._connection = ours

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
