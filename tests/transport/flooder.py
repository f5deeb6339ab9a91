"""A program that floods a server or a client: python flooder.py KIND PORT SECONDS [KEY_FILE]."""

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
HEAD = struct.Struct("<8sIQ")
MAGIC = b"LOCO\0\0\0\2"
REQUEST = HEAD.pack(MAGIC, 4, 0) + b"note"
NUM_CONNECTIONS = 40
NUM_IDLE = 2000

Pour = Callable[[socket.socket, float], None]


def again_and_again(words: bytes) -> Pour:
    """The same without end."""

    def pour(connection: socket.socket, until: float) -> None:
        while time.monotonic() < until:
            connection.sendall(words)

    return pour


def once(words: bytes) -> Pour:
    """Something, and then nothing more."""

    def pour(connection: socket.socket, until: float) -> None:
        connection.sendall(words)
        while time.monotonic() < until and connection.recv(1):
            time.sleep(0.1)

    return pour


def slowly(words: bytes) -> Pour:
    """A byte now and then."""

    def pour(connection: socket.socket, until: float) -> None:
        for byte in words * 10_000:
            if time.monotonic() > until:
                return
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return pour


KINDS: dict[str, Pour] = {
    "garbage": again_and_again(os.urandom(1000)),
    "long notes": once(HEAD.pack(MAGIC, 2**32 - 1, 0)),
    "long bodies": again_and_again(HEAD.pack(MAGIC, 4, 2**62) + b"note" + bytes(100_000)),
    "requests": again_and_again(REQUEST * 1000),
    "unread replies": once(REQUEST),
    "a byte now and then": slowly(HEAD.pack(MAGIC, 1000, 0) + bytes(1000)),
}


def connect(kind: str, port: int, until: float, context: ssl.SSLContext | None) -> None:
    """As a client who comes again when the connection is closed."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)) as connection:
            connection.settimeout(0.5)
            if context is None:
                KINDS[kind](connection, until)
            else:
                with context.wrap_socket(connection) as secured:
                    KINDS[kind](secured, until)


def connect_often(kind: str, port: int, seconds: float, context: ssl.SSLContext | None) -> None:
    """Over many connections at once."""
    arguments = (kind, port, time.monotonic() + seconds, context)
    threads = [threading.Thread(target=connect, args=arguments) for _ in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    print("here it comes", flush=True)
    for thread in threads:
        thread.join()


def be_idle(port: int, seconds: float) -> None:
    """Over thousands of connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(socket.create_connection((HOST, port)))
        print("here it comes", flush=True)
        time.sleep(seconds)


def listen(kind: str, port: int, seconds: float, context: ssl.SSLContext | None) -> None:
    """As a server, to whoever comes."""
    until = time.monotonic() + seconds
    with socket.create_server((HOST, port)) as server:
        server.settimeout(0.1)
        print("here it comes", flush=True)
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
    """A process that has begun, and is ended if it has not yet."""
    arguments = [role, kind, str(port), str(seconds), str(key_file or "")]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "here it comes\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Flood."""
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
