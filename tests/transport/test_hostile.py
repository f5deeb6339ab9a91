"""Floods and invalid messages: memory and files are bounded, and honest clients are served."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_loco.transport import Client, JobCertificate, Request, read_certificate
from tests.harness.flooder import KINDS, flooding
from tests.harness.guards import open_files
from tests.harness.limits import HARNESS_S
from tests.harness.programs import free_ports
from tests.harness.sockets import (
    HOST,
    MB,
    asking,
    message,
    new_certificate,
    raw_connection,
    resident_bytes,
    serving,
)

pytestmark = pytest.mark.recovery

MOST_GROWTH = 16 * MB
MOST_CONNECTIONS = 40
BODY = bytes(2_000_000)


def send_body(request: Request) -> None:
    request.reply(b"body", BODY)


def ask(client: Client) -> bool:
    """Make a request; return whether the whole reply was received."""
    memory = bytearray(len(BODY))
    try:
        reply = client.request(b"ask", timeout_s=HARNESS_S)
        reply.receive_into(memoryview(memory), timeout_s=HARNESS_S)
    except ConnectionError:  # evicted; the client reconnects
        client.close()
        return False
    return memory == BODY


class Largest:
    """The largest growth of this process in bytes and open files while another process runs."""

    def __init__(self, during: subprocess.Popen[str]) -> None:
        before_bytes, before_files = resident_bytes(), open_files()
        self.bytes = self.files = 0
        while during.poll() is None:
            self.bytes = max(self.bytes, resident_bytes() - before_bytes)
            self.files = max(self.files, open_files() - before_files)
            time.sleep(0.01)


@contextlib.contextmanager
def honest_client(port: int, certificate: JobCertificate | None) -> Iterator[list[bool]]:
    """Run a client that makes requests in a thread; yield whether each of them was answered."""
    answered: list[bool] = []
    ended = threading.Event()

    def run() -> None:
        with contextlib.closing(Client(HOST, port, certificate)) as client:
            while not ended.wait(0.02):
                answered.append(ask(client))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answered
    finally:
        ended.set()
        thread.join()


def rows(*soak: tuple[str, bool]) -> list[object]:
    """Return all kinds of floods, with and without a key file; rows in ``soak`` are marked so."""
    return [
        pytest.param(*row, marks=[pytest.mark.soak] if row in soak else [])
        for row in itertools.product(KINDS, (False, True))
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "has_key_file"),
    rows(
        ("garbage", True),
        ("long headers", True),
        ("long bodies", True),
        ("slow bytes", True),
        ("requests", False),
        ("unread replies", False),
    ),
)
def test_flooded_server_does_not_grow_and_serves_others(
    kind: str, has_key_file: bool, tmp_path: Path
) -> None:
    """If there is a key file, the flooder has it as well."""
    key_file = new_certificate(tmp_path) if has_key_file else None
    certificate = read_certificate(key_file) if key_file else None
    with (
        serving(
            send_body, certificate=certificate, max_connections=MOST_CONNECTIONS, timeout_s=5
        ) as server,
        asking(server, certificate) as client,
    ):
        assert ask(client)
        with (
            honest_client(server.port, certificate) as answered,
            flooding("connect", kind, server.port, 3, key_file) as flooder,
        ):
            largest = Largest(flooder)
        assert largest.bytes < MOST_GROWTH
        assert largest.files <= MOST_CONNECTIONS + 5
        assert sum(answered) >= 3
        client.close()
        assert ask(client)


@pytest.mark.process
@pytest.mark.parametrize("has_key_file", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_idle_connections_use_bounded_files_and_memory(has_key_file: bool, tmp_path: Path) -> None:
    certificate = read_certificate(new_certificate(tmp_path)) if has_key_file else None
    with serving(send_body, certificate=certificate, max_connections=MOST_CONNECTIONS) as server:
        before_files, before_bytes = open_files(), resident_bytes()
        with flooding("idle", "", server.port, 2), asking(server, certificate) as client:
            assert open_files() - before_files <= MOST_CONNECTIONS + 5
            assert resident_bytes() - before_bytes < MOST_GROWTH
            for _ in range(20):
                assert ask(client)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "has_key_file"), rows(*((kind, True) for kind in KINDS)))
def test_flooded_client_does_not_grow(kind: str, has_key_file: bool, tmp_path: Path) -> None:
    key_file = new_certificate(tmp_path) if has_key_file else None
    certificate = read_certificate(key_file) if key_file else None
    (port,) = free_ports()
    with flooding("listen", kind, port, 2, key_file) as flooder:
        ended = threading.Event()

        def read() -> None:
            with contextlib.closing(Client(HOST, port, certificate)) as client:
                while not ended.wait(0.01):
                    with contextlib.suppress(OSError):
                        client.request(b"head", timeout_s=0.2)

        thread = threading.Thread(target=read)
        thread.start()
        largest = Largest(flooder)
        ended.set()
        thread.join()
    assert largest.bytes < MOST_GROWTH
    assert largest.files < 10


def invalid_messages(count: int) -> Iterator[bytes]:
    """Return messages that violate the protocol in various ways."""
    draw = random.Random(0)
    good = message(b"head")
    for number in range(count):
        match number % 6:
            case 0:
                yield draw.randbytes(draw.randrange(300))
            case 1:
                yield good[: draw.randrange(len(good))]
            case 2:
                index = draw.randrange(8)
                yield good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :]
            case 3:
                yield message(b"head", os.urandom(500))
            case 4:
                yield message(bytes(1025))
            case 5:
                yield good + draw.randbytes(1 + draw.randrange(500))


def test_server_survives_a_thousand_invalid_messages() -> None:
    with serving(send_body, max_connections=MOST_CONNECTIONS) as server:
        before = resident_bytes()
        for data in invalid_messages(1000):
            with raw_connection(server.port) as connection, contextlib.suppress(OSError):
                connection.sendall(data)
        with asking(server) as client:
            assert ask(client)
        assert resident_bytes() - before < MOST_GROWTH
