"""Servers, clients, and plain sockets that can send anything."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_loco.transport import Client, Request, Server, write_certificate
from tests.harness.flooder import HOST, MAGIC, PREFIX
from tests.harness.limits import SOON_S

MB = 2**20


def echo(request: Request) -> None:
    """Reply with the header and the body of the request."""
    body = bytearray(request.body_bytes)
    request.receive_into(memoryview(body))
    request.reply(request.header, body)


@contextlib.contextmanager
def serving(answer: Callable[[Request], None] = echo, **settings: Any) -> Iterator[Server]:
    """Yield a running server, which is closed at the end."""
    server = Server(answer, **settings)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def asking(server: Server, certificate: Any = None) -> Iterator[Client]:
    """Yield a client of a server, which is closed at the end."""
    client = Client(HOST, server.port, certificate)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def raw_connection(port: int) -> Iterator[socket.socket]:
    """Open a plain TCP connection."""
    with socket.create_connection((HOST, port)) as connection:
        connection.settimeout(SOON_S)
        yield connection


@contextlib.contextmanager
def raw_server(port: int, data: bytes) -> Iterator[None]:
    """Run a plain TCP server that sends every client the same bytes and waits for it to close."""
    with socket.create_server((HOST, port)) as listener:
        listener.settimeout(0.05)
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(SOON_S)
                    connection.sendall(data)
                    while connection.recv(2**16):
                        pass

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def message(header: bytes, body: bytes = b"", magic: bytes = MAGIC) -> bytes:
    """Return the bytes of a message on the wire."""
    return PREFIX.pack(magic, len(header), len(body)) + header + body


def wait_until_closed(connection: socket.socket) -> None:
    """Wait until the other side has closed a plain connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass


def new_certificate(folder: Path, name: str = "job.pem") -> Path:
    """Write a new certificate file and return its path."""
    write_certificate(folder / name)
    return folder / name


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
