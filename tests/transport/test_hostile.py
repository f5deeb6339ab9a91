"""Strangers, and holders of the key file, who send anything: nothing grows, others are served."""

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
from tests.limits import HARNESS_S
from tests.programs import free_ports
from tests.transport.flooder import KINDS, flooding
from tests.transport.helpers import (
    HOST,
    MB,
    asking,
    message,
    new_certificate,
    open_files,
    resident_bytes,
    serving,
    stranger,
)

pytestmark = pytest.mark.recovery

MOST_GROWTH = 16 * MB
MOST_CONNECTIONS = 40
BODY = bytes(2_000_000)


def send_body(request: Request) -> None:
    request.reply(b"body", BODY)


def ask(client: Client) -> bool:
    """Whether a request is answered whole."""
    memory = bytearray(len(BODY))
    try:
        reply = client.request(b"ask", timeout_s=HARNESS_S)
        reply.receive_into(memoryview(memory), timeout_s=HARNESS_S)
    except ConnectionError:  # evicted; a client comes again
        client.close()
        return False
    return memory == BODY


class Largest:
    """How many bytes and files this process has more while another one runs, at most."""

    def __init__(self, during: subprocess.Popen[str]) -> None:
        before_bytes, before_files = resident_bytes(), open_files()
        self.bytes = self.files = 0
        while during.poll() is None:
            self.bytes = max(self.bytes, resident_bytes() - before_bytes)
            self.files = max(self.files, open_files() - before_files)
            time.sleep(0.01)


@contextlib.contextmanager
def honest(port: int, certificate: JobCertificate | None) -> Iterator[list[bool]]:
    """Somebody who asks again and again meanwhile; whether he was answered."""
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
    """All kinds of floods, with and without a key file; some only for the soak."""
    return [
        pytest.param(*row, marks=[pytest.mark.soak] if row in soak else [])
        for row in itertools.product(KINDS, (False, True))
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "has_key_file"),
    rows(
        ("garbage", True),
        ("long notes", True),
        ("long bodies", True),
        ("a byte now and then", True),
        ("requests", False),
        ("unread replies", False),
    ),
)
def test_a_server_does_not_grow_and_serves_others(
    kind: str, has_key_file: bool, tmp_path: Path
) -> None:
    """The one who floods has got hold of the key file, if there is one."""
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
            honest(server.port, certificate) as answered,
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
def test_thousands_of_idle_connections_leave_files_and_memory_for_others(
    has_key_file: bool, tmp_path: Path
) -> None:
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
def test_a_client_does_not_grow(kind: str, has_key_file: bool, tmp_path: Path) -> None:
    key_file = new_certificate(tmp_path) if has_key_file else None
    certificate = read_certificate(key_file) if key_file else None
    (port,) = free_ports()
    with flooding("listen", kind, port, 2, key_file) as flooder:
        ended = threading.Event()

        def read() -> None:
            with contextlib.closing(Client(HOST, port, certificate)) as client:
                while not ended.wait(0.01):
                    with contextlib.suppress(OSError):
                        client.request(b"note", timeout_s=0.2)

        thread = threading.Thread(target=read)
        thread.start()
        largest = Largest(flooder)
        ended.set()
        thread.join()
    assert largest.bytes < MOST_GROWTH
    assert largest.files < 10


def hostile_messages(count: int) -> Iterator[bytes]:
    """Everything that somebody could think of."""
    draw = random.Random(0)
    good = message(b"note")
    for number in range(count):
        match number % 6:
            case 0:
                yield draw.randbytes(draw.randrange(300))
            case 1:
                yield good[: draw.randrange(len(good))]
            case 2:
                place = draw.randrange(8)
                yield good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
            case 3:
                yield message(b"note", os.urandom(500))
            case 4:
                yield message(bytes(1025))
            case 5:
                yield good + draw.randbytes(1 + draw.randrange(500))


def test_a_thousand_hostile_messages_change_nothing() -> None:
    with serving(send_body, max_connections=MOST_CONNECTIONS) as server:
        before = resident_bytes()
        for words in hostile_messages(1000):
            with stranger(server.port) as connection, contextlib.suppress(OSError):
                connection.sendall(words)
        with asking(server) as client:
            assert ask(client)
        assert resident_bytes() - before < MOST_GROWTH
