"""Nodes on this machine, in this process and in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers import NodeDirectory, Peer, PeerNode, Received
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.model import Model
from lightning_loco.peers.protocol import DATA, Reply, Request, pack_reply, parse_request
from lightning_loco.peers.publications import Publications
from lightning_loco.peers.serving import ServingThread
from tests.limits import SOON_S
from tests.programs import free_ports

CHECKSUM = 0x1122334455667788
HOST = "127.0.0.1"
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


def wait_until_ended(node: PeerNode) -> None:
    """Until the counts tell of the last fetch: a wait may end before it does."""
    deadline = time.monotonic() + SOON_S
    while not node.has_ended:
        assert time.monotonic() < deadline, "the fetch has not ended"
        time.sleep(0.001)


@contextlib.contextmanager
def serving(
    peer: Peer, value: float | None = None, model: Model = MODEL, keys: Keys | None = None
) -> Iterator[tuple[ServingThread, Publications]]:
    """A thread that serves at the port of a peer: a vector of one value, or nothing yet."""
    publications = Publications(model)
    if value is not None:
        publications.publish(torch.full((model.numel,), value), Tag(value, value))
    thread = ServingThread(model, publications, host=peer.host, port=peer.port, keys=keys)
    thread.start()
    try:
        yield thread, publications
    finally:
        thread.close()


@contextlib.contextmanager
def silent(peer: Peer) -> Iterator[socket.socket]:
    """Somebody who listens at the port of a peer, and never says anything."""
    with socket.create_server((peer.host, peer.port)) as server:
        yield server


@contextlib.contextmanager
def dealer(port: int, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A bare ZeroMQ socket that is connected to whoever serves at a port."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.linger = 2000
    if identity:
        connection.identity = identity
    connection.connect(f"tcp://{HOST}:{port}")
    try:
        yield connection
    finally:
        connection.close()
        context.term()


Answer = Callable[[Request], Iterable[list[bytes]]]
"""What somebody who is not one of ours sends back when asked: messages, of frames each."""


@contextlib.contextmanager
def answering(port: int, answer: Answer, keys: Keys | None = None) -> Iterator[None]:
    """Somebody at a port who answers every request with what the test says."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    if keys is not None:
        keys.guard(router)
    router.bind(f"tcp://{HOST}:{port}")

    def run() -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                stranger, frame = router.recv_multipart()
                for frames in answer(parse_request(frame)):
                    router.send_multipart([stranger, *frames])
        router.close()

    thread = threading.Thread(target=run, name="answering")
    thread.start()
    try:
        yield
    finally:
        context.term()
        thread.join()


def right_reply(request: Request, total_bytes: int, publication: int = 5, tag: Tag = TAG) -> Reply:
    """What one of ours would say about a chunk that it has."""
    return Reply(
        DATA,
        request.checksum,
        request.wire_format,
        request.request_id,
        publication,
        request.offset,
        request.length,
        total_bytes,
        tag,
    )


def right_answer(
    request: Request,
    total_bytes: int,
    value: float,
    tag: Tag = TAG,
    dtype: torch.dtype = torch.float32,
) -> list[bytes]:
    """The frames of a chunk of one value."""
    chunk = torch.full((request.length // dtype.itemsize,), value, dtype=dtype).numpy().tobytes()
    return [pack_reply(right_reply(request, total_bytes, tag=tag)), chunk]


def open_files() -> int:
    """Open file descriptors of this process: sockets, pipes, files."""
    return len(os.listdir("/proc/self/fd"))


def peer_threads() -> list[str]:
    """Names of the threads of nodes."""
    return [t.name for t in threading.enumerate() if t.name.startswith("loco-peer")]


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
