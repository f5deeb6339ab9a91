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

import contextlib
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from harness import HOST, Worker, free_port, ratios, spread

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import CODECS
from lightning_loco.gossip import NodeListDiscovery, Peer, PeerNode
from lightning_loco.transport import write_certificate

FORMATS = ["float32", "bf16", "fp16", "int8"]
TIMEOUT_S = 60.0
BOUND = 0.80


def time_turns(
    worker: Worker, num_bytes: int, turns: int, settings: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of every turn; worker 0 reads what worker 1 serves."""
    with contextlib.ExitStack() as stack:
        node = open_node(worker, num_bytes, settings)
        stack.callback(node.close)
        read = open_socket(worker, num_bytes, stack)

        def timed(work: Callable[[], None]) -> float:
            worker.wait_for_all()
            started = time.perf_counter()
            if worker.rank == 0:
                work()
            seconds = time.perf_counter() - started
            worker.wait_for_all()
            return seconds

        kinds = {"socket": partial(timed, read), "fetch": partial(timed, partial(fetch, node))}
        return harness.in_turns(kinds, turns)


def open_node(worker: Worker, num_bytes: int, settings: dict[str, Any]) -> PeerNode:
    """Worker 1 serves ones, encoded in this number of bytes or a few less; worker 0 reads."""
    numel = num_bytes // 4
    if "compression" in settings:
        codec = CODECS[settings["compression"]]()
        numel = num_bytes // codec.row_bytes * codec.block
    ports = worker.gather(free_port())
    peers = [Peer("reader", HOST, ports[0]), Peer("server", HOST, ports[1])]
    discovery = NodeListDiscovery(peers, peers[worker.rank].name)
    node = PeerNode(
        numel, torch.float32, discovery, schema_checksum=1, fetch_timeout_s=TIMEOUT_S, **settings
    )
    if worker.rank == 1:
        node.publish(torch.ones(numel), Tag(1, 1))
    return node


def fetch(node: PeerNode) -> None:
    """Read all parameters."""
    node.start_fetch()
    received = node.wait()
    assert received is not None
    assert abs(received.params[-1] - 1) < 1e-6


def open_socket(worker: Worker, num_bytes: int, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Connect the workers; worker 1 sends, and worker 0 gets a function that reads."""
    memory = memoryview(bytearray(b"\1") * num_bytes)
    listener = stack.enter_context(socket.create_server((HOST, 0)))
    port = worker.gather(listener.getsockname()[1])[1]
    if worker.rank == 1:
        connection = stack.enter_context(listener.accept()[0])
        threading.Thread(target=serve, args=(connection, memory), daemon=True).start()
        return lambda: None
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


def main() -> None:
    options = harness.parse(
        __doc__,
        megabytes=200,
        turns=15,
        compression=FORMATS,
        quick={"megabytes": 8, "turns": 3},
        choices={"compression": FORMATS},
    )
    rows = []
    kinds = [(name, False) for name in options.compression]
    for compression, is_encrypted in [*kinds, ("float32", True)]:
        with tempfile.TemporaryDirectory() as folder:
            settings = {} if compression == "float32" else {"compression": compression}
            if is_encrypted:
                settings["key_file"] = f"{folder}/job.pem"
                write_certificate(settings["key_file"])
            arguments = (options.megabytes * 1_000_000, options.turns, settings)
            seconds = harness.run_workers(time_turns, 2, *arguments)[0]
        found = ratios(seconds["socket"], seconds["fetch"])
        name = f"{options.megabytes} MB of {compression}" + ", key file" * is_encrypted
        rates = [options.megabytes / statistics.median(s) for s in seconds.values()]
        bound = "-" if settings else harness.at_least(statistics.median(found), BOUND)
        rows.append([name, *(f"{rate:.0f}" for rate in rates), spread(found), bound])
        print(f"done: {name}", flush=True)
    harness.print_table(["one fetch", "socket MB/s", "fetch MB/s", "fetch/socket", "bound"], rows)


if __name__ == "__main__":
    main()
