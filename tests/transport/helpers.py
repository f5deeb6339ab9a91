"""Servers on this machine, and strangers who speak whatever they like to them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_loco.transport import Client, Request, Server, write_certificate
from tests.limits import SOON_S
from tests.transport.flooder import HEAD, HOST, MAGIC

MB = 2**20


def echo(request: Request) -> None:
    """Answer with what was asked."""
    body = bytearray(request.body_bytes)
    request.receive_into(memoryview(body))
    request.reply(request.note, body)


@contextlib.contextmanager
def serving(answer: Callable[[Request], None] = echo, **settings: Any) -> Iterator[Server]:
    """A server that answers; closed in the end."""
    server = Server(answer, **settings)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def asking(server: Server, certificate: Any = None) -> Iterator[Client]:
    """A client of a server; closed in the end."""
    client = Client(HOST, server.port, certificate)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def stranger(port: int) -> Iterator[socket.socket]:
    """A bare connection."""
    with socket.create_connection((HOST, port)) as connection:
        connection.settimeout(SOON_S)
        yield connection


@contextlib.contextmanager
def saying(port: int, words: bytes) -> Iterator[None]:
    """Somebody at a port who says the same to all who come, and waits until they go."""
    with socket.create_server((HOST, port)) as listener:
        listener.settimeout(0.05)
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(SOON_S)
                    connection.sendall(words)
                    while connection.recv(2**16):
                        pass

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def message(note: bytes, body: bytes = b"", magic: bytes = MAGIC) -> bytes:
    """As it travels."""
    return HEAD.pack(magic, len(note), len(body)) + note + body


def wait_until_closed(connection: socket.socket) -> None:
    """Until the other side has closed a bare connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; fails if it does not."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def new_certificate(folder: Path, name: str = "job.pem") -> Path:
    """The file of a new certificate."""
    write_certificate(folder / name)
    return folder / name


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    """Open file descriptors of this process: sockets, pipes, files."""
    return len(os.listdir("/proc/self/fd"))


def transport_threads() -> list[str]:
    """Names of the threads of servers and their connections."""
    return [t.name for t in threading.enumerate() if t.name.startswith("loco-server")]
