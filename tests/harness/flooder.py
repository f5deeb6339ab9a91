"""Flood a server or a client: python flooder.py ROLE KIND PORT SECONDS KEY_FILE."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HOST = "127.0.0.1"
PREFIX = struct.Struct("<8sIQ")
MAGIC = b"LOCO\0\0\0\2"
REQUEST = PREFIX.pack(MAGIC, 4, 0) + b"head"
NUM_CONNECTIONS = 40
NUM_IDLE = 2000

Sender = Callable[[socket.socket, float], None]
"""Sends over a connection until a time of the monotonic clock."""


def repeatedly(data: bytes) -> Sender:
    """Send the same bytes again and again."""

    def send(connection: socket.socket, until: float) -> None:
        while time.monotonic() < until:
            connection.sendall(data)

    return send


def once(data: bytes) -> Sender:
    """Send once, then keep the connection open."""

    def send(connection: socket.socket, until: float) -> None:
        connection.sendall(data)
        while time.monotonic() < until and connection.recv(1):
            time.sleep(0.1)

    return send


def slowly(data: bytes) -> Sender:
    """Send one byte every 0.1 s."""

    def send(connection: socket.socket, until: float) -> None:
        for byte in data * 10_000:
            if time.monotonic() > until:
                return
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return send


KINDS: dict[str, Sender] = {
    "garbage": repeatedly(os.urandom(1000)),
    "long headers": once(PREFIX.pack(MAGIC, 2**32 - 1, 0)),
    "long bodies": repeatedly(PREFIX.pack(MAGIC, 4, 2**62) + b"head" + bytes(100_000)),
    "requests": repeatedly(REQUEST * 1000),
    "unread replies": once(REQUEST),
    "slow bytes": slowly(PREFIX.pack(MAGIC, 1000, 0) + bytes(1000)),
}


def connect(kind: str, port: int, until: float, context: ssl.SSLContext | None) -> None:
    """Act as a client that reconnects when the connection is closed."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)) as connection:
            connection.settimeout(0.5)
            if context is None:
                KINDS[kind](connection, until)
            else:
                with context.wrap_socket(connection) as secured:
                    KINDS[kind](secured, until)


def connect_often(kind: str, port: int, seconds: float, context: ssl.SSLContext | None) -> None:
    """Flood over many connections at the same time."""
    arguments = (kind, port, time.monotonic() + seconds, context)
    threads = [threading.Thread(target=connect, args=arguments) for _ in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    print("started", flush=True)
    for thread in threads:
        thread.join()


def be_idle(port: int, seconds: float) -> None:
    """Hold thousands of idle connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(socket.create_connection((HOST, port)))
        print("started", flush=True)
        time.sleep(seconds)


def listen(kind: str, port: int, seconds: float, context: ssl.SSLContext | None) -> None:
    """Act as a server that floods its clients."""
    until = time.monotonic() + seconds
    with socket.create_server((HOST, port)) as server:
        server.settimeout(0.1)
        print("started", flush=True)
        while time.monotonic() < until:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(0.5)
                if context is None:
                    KINDS[kind](connection, until)
                else:
                    with context.wrap_socket(connection, server_side=True) as secured:
                        KINDS[kind](secured, until)


@contextlib.contextmanager
def flooding(
    role: str, kind: str, port: int, seconds: float, key_file: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run the flooder in a separate process, which is killed at the end."""
    arguments = [role, kind, str(port), str(seconds), str(key_file or "")]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Run the command line."""
    role, kind, port, seconds, key_file = sys.argv[1:]
    context = None
    if key_file:
        is_server = role == "listen"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_cert_chain(key_file)
        context.load_verify_locations(key_file)
        context.verify_mode = ssl.CERT_REQUIRED
    if role == "idle":
        be_idle(int(port), float(seconds))
    elif role == "connect":
        connect_often(kind, int(port), float(seconds), context)
    else:
        listen(kind, int(port), float(seconds), context)


if __name__ == "__main__":
    main()
