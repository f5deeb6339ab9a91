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
from lightning_loco.peers import NodeDirectory, Peer, PeerNode, Received

CHECKSUM = 0x1122334455667788
HOST = "127.0.0.1"

_processes = multiprocessing.get_context("forkserver")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def peers(count: int) -> list[Peer]:
    """Names and addresses for so many nodes."""
    return [Peer(f"p{index}", HOST, port) for index, port in enumerate(free_ports(count))]


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
