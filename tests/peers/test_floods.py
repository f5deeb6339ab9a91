"""Floods: endless messages, more requests than can be answered, thousands of idle connections."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.keys import write_key_file
from lightning_loco.peers.protocol import (
    Request,
    pack_request,
)
from tests.peers.helpers import (
    CHECKSUM,
    HOST,
    fetch,
    open_files,
    two_nodes,
)
from tests.peers.test_hostile import MB, resident_bytes

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\6"
TINY = b"\x01\x01x" * 20_000
LARGE = (b"\x03" + (1000).to_bytes(8, "big") + bytes(1000)) * 60
REQUEST = pack_request(Request(CHECKSUM, 1, 7, 0, 0, 8))
SECONDS = 2.0
NUMEL = 500_000


def read(connection: socket.socket, count: int) -> bytes:
    """So many bytes."""
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def pour(
    connection: socket.socket,
    kind: bytes,
    flood: bytes,
    until: float,
    before: Callable[[socket.socket], None] | None = None,
) -> None:
    """Greet, and send the same again and again until the other side closes."""
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        connection.sendall(GREETING + READY + kind)
        read(connection, 64)
        read(connection, read(connection, 2)[1])  # the other side is ready, too
        if before is not None:
            before(connection)
        while time.monotonic() < until:
            connection.sendall(flood)


def largest_growth(during: Callable[[], None]) -> int:
    """By how many bytes this process grew at most."""
    before = largest = resident_bytes()
    thread = threading.Thread(target=during)
    thread.start()
    while thread.is_alive():
        largest = max(largest, resident_bytes())
        time.sleep(0.01)
    thread.join()
    return largest - before


@pytest.mark.slow
@pytest.mark.parametrize("flood", [TINY, LARGE], ids=["tiny", "large"])
def test_a_server_does_not_grow_and_goes_on_serving(flood: bytes) -> None:
    with two_nodes(NUMEL) as (here, there):
        flat = torch.randn(NUMEL)
        there.publish(flat, Tag(1, 2))
        assert fetch(here) is not None

        def attack() -> None:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                connection = socket.create_connection((HOST, there.port))
                with contextlib.closing(connection):
                    pour(connection, b"DEALER", flood, until)

        assert largest_growth(attack) < 60 * MB
        received = fetch(here)
        assert received is not None
        assert torch.equal(received.params, flat)


IDLE = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, greets = int(sys.argv[1]), sys.argv[2] == "True"
greeting = bytes.fromhex(sys.argv[3])
kept = []
for _ in range(2000):
    kept.append(socket.create_connection(("127.0.0.1", port)))
    if greets:
        kept[-1].sendall(greeting)
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [False, True])
def test_thousands_of_idle_connections_leave_files_for_others(
    tmp_path: Path, has_keys: bool
) -> None:
    settings = {"key_file": tmp_path / "keys"} if has_keys else {}
    if has_keys:
        write_key_file(tmp_path / "keys")
    with two_nodes(**settings) as (here, there):
        there.publish(torch.ones(1000), Tag(1, 1))
        assert fetch(here) is not None
        before = open_files()
        arguments = [str(there.port), str(not has_keys), (GREETING + READY + b"DEALER").hex()]
        stranger = subprocess.Popen(
            [sys.executable, "-c", IDLE, *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "there\n"
            time.sleep(0.5)
            assert open_files() < before + 100
            for _ in range(20):
                assert fetch(here) is not None
        finally:
            stranger.kill()
            stranger.wait()
            stranger.stdout.close()
