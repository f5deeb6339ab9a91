"""What it costs to read a peer's parameters over the loopback, against a bare TCP socket.

Measured: the seconds of one fetch with ``PeerNode`` between two processes, from ``start_fetch`` to
the end of ``wait``, and of the same bytes with ``sendall`` and ``recv_into`` into a buffer that is
there already, on a connection that is there already. The two take turns, and which comes first
changes; the first turn is not counted. A fetch includes its check that all values are finite.

How to read it: the ratio is the socket's seconds divided by the fetch's, turn by turn, and
should be at least 0.80 for float32. The same bytes with a codec are two or four times as many
parameters, which are decoded to float32 as they come, and with a key file all is encrypted: those
rows have no bound. Whatever else runs on the machine changes both; look at the load.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import (
    HOST,
    Worker,
    at_least,
    in_turns,
    make_parser,
    print_machine,
    print_table,
    ratios,
    run_workers,
    spread,
)

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import CODECS
from lightning_loco.gossip import NodeListDiscovery, Peer, PeerNode
from lightning_loco.transport import write_certificate

BOUND = 0.80
FORMATS = ("float32", "bf16", "fp16", "int8")
MB = 1e6
PATIENCE_S = 60.0


def time_turns(
    worker: Worker, ports: list[int], num_bytes: int, turns: int, settings: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of every turn; worker 0 reads what worker 1 serves."""
    with contextlib.ExitStack() as stack:
        numel = numel_of(num_bytes, settings.get("compression"))
        node = open_node(worker, ports, numel, settings)
        stack.callback(node.close)
        read = open_socket(worker, ports[2], num_bytes, stack)
        fetch = partial(fetch_once, node) if worker.rank == 0 else lambda: None

        def timed(work: Callable[[], None]) -> float:
            worker.wait_for_all()
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            worker.wait_for_all()
            return seconds

        kinds = {"socket": read, "fetch": fetch}
        return in_turns({name: partial(timed, work) for name, work in kinds.items()}, turns)


def numel_of(num_bytes: int, compression: str | None) -> int:
    """How many parameters travel in this number of bytes, or a few less."""
    if compression is None:
        return num_bytes // 4
    codec = CODECS[compression]()
    return num_bytes // codec.row_bytes * codec.block


def open_node(worker: Worker, ports: list[int], numel: int, settings: dict[str, Any]) -> PeerNode:
    """Worker 0 reads, worker 1 serves ones."""
    peers = [Peer("reader", HOST, ports[0]), Peer("server", HOST, ports[1])]
    node = PeerNode(
        numel,
        torch.float32,
        NodeListDiscovery(peers, peers[worker.rank].name),
        schema_checksum=1,
        fetch_timeout_s=PATIENCE_S,
        **settings,
    )
    if worker.rank == 1:
        node.publish(torch.ones(numel), Tag(1, 1))
    return node


def new_key_file(folder: str) -> str:
    """A key file in a folder."""
    write_certificate(f"{folder}/job.pem")
    return f"{folder}/job.pem"


def fetch_once(node: PeerNode) -> None:
    """Read all parameters."""
    node.start_fetch()
    received = node.wait()
    assert received is not None
    assert abs(received.params[-1] - 1) < 1e-6


def open_socket(worker: Worker, port: int, num_bytes: int, stack: contextlib.ExitStack) -> Any:
    """A function that reads the same bytes, or one that sends them."""
    memory = memoryview(bytearray(b"\1") * num_bytes)
    if worker.rank == 1:
        listener = stack.enter_context(socket.create_server((HOST, port)))
        worker.wait_for_all()
        connection = stack.enter_context(listener.accept()[0])
        sender = threading.Thread(target=serve, args=(connection, memory), daemon=True)
        sender.start()
        return lambda: None
    worker.wait_for_all()
    connection = stack.enter_context(socket.create_connection((HOST, port)))

    def read() -> None:
        connection.sendall(b"?")
        filled = 0
        while filled < num_bytes:
            filled += connection.recv_into(memory[filled:])

    return read


def serve(connection: socket.socket, memory: memoryview) -> None:
    """Send everything whenever one byte has come, until the connection is closed."""
    with contextlib.suppress(OSError):
        while connection.recv(1):
            connection.sendall(memory)


def free_ports(count: int) -> list[int]:
    """Ports at which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="bytes that travel, in millions")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--compression", nargs="+", choices=FORMATS, default=FORMATS)
    options: argparse.Namespace = parser.parse_args()
    if options.quick:
        options.megabytes, options.turns = 8, 3
    print_machine()
    rows = []
    num_bytes = options.megabytes * 1_000_000
    for compression, has_key_file in [
        *((name, False) for name in options.compression),
        ("float32", True),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {}
            if compression != "float32":
                settings["compression"] = compression
            if has_key_file:
                settings["key_file"] = new_key_file(folder)
            arguments = (free_ports(3), num_bytes, options.turns, settings)
            seconds = run_workers(time_turns, 2, *arguments)[0]
        of_socket = ratios(seconds["socket"], seconds["fetch"])
        has_bound = compression == "float32" and not has_key_file
        name = f"{options.megabytes} MB of {compression}" + ", key file" * has_key_file
        rates = (num_bytes / MB / statistics.median(seconds[kind]) for kind in ("socket", "fetch"))
        bound = at_least(statistics.median(of_socket), BOUND) if has_bound else "-"
        rows.append([name, *(f"{rate:.0f}" for rate in rates), spread(of_socket), bound])
        print(f"done: {name}", flush=True)
    print_table(["one fetch", "socket MB/s", "fetch MB/s", "fetch/socket", "bound"], rows)


if __name__ == "__main__":
    main()
