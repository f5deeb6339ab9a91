"""Somebody who floods: ``python flooder.py connect|listen|listen_idle PORT SECONDS``.

In a process of its own, so that the memory of the one who is flooded is measured alone; it imports
nothing of ours, to be there soon. What it sends comes as hexadecimal lines: the flood, and a reply
that says that there is nothing to read yet.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\6"
NUM_CONNECTIONS = 8
NUMBER = slice(24, 32)  # of a request, in it and in the reply


def frame(body: bytes, *, has_more: bool = False) -> bytes:
    """As it travels."""
    if len(body) < 256:
        return bytes([has_more, len(body)]) + body
    return bytes([2 | has_more]) + len(body).to_bytes(8, "big") + body


def read(connection: socket.socket, count: int) -> bytes:
    """So many bytes."""
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def greet(connection: socket.socket, kind: bytes) -> None:
    """Until the other side is ready, too."""
    connection.sendall(GREETING + READY + kind)
    read(connection, 64)
    read(connection, read(connection, 2)[1])


def say_empty(connection: socket.socket, reply: bytes) -> None:
    """Answer the first request that there is nothing to read yet."""
    request = read(connection, read(connection, 2)[1])
    connection.sendall(frame(reply[: NUMBER.start] + request[NUMBER] + reply[NUMBER.stop :]))


def pour(connection: socket.socket, flood: bytes, until: float) -> None:
    """Send the same again and again until the other side closes."""
    while time.monotonic() < until:
        connection.sendall(flood)


def connect_and_pour(port: int, flood: bytes, until: float) -> None:
    """As a client who never reads, and comes again when it is closed."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)) as connection:
            connection.settimeout(0.5)
            greet(connection, b"DEALER")
            pour(connection, flood, until)


def listen_and_pour(port: int, flood: bytes, until: float, reply: bytes | None) -> None:
    """As a peer, after an answer as it should be if there is one."""
    with socket.create_server((HOST, port)) as server:
        server.settimeout(0.1)
        print("here it comes", flush=True)
        while time.monotonic() < until:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(0.5)
                greet(connection, b"ROUTER")
                if reply is not None:
                    say_empty(connection, reply)
                pour(connection, flood, until)


@contextlib.contextmanager
def flooding(
    role: str, port: int, flood: bytes, seconds: float, reply: bytes = b""
) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun, and is ended if it has not yet."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), role, str(port), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{flood.hex()}\n{reply.hex()}\n")
        process.stdin.close()
        assert process.stdout.readline() == "here it comes\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Flood."""
    role, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    flood, reply = (bytes.fromhex(line.strip()) for line in sys.stdin)
    until = time.monotonic() + seconds
    if role != "connect":
        listen_and_pour(port, flood, until, reply if role == "listen_idle" else None)
        return
    arguments = (port, flood, until)
    threads = [
        threading.Thread(target=connect_and_pour, args=arguments) for _ in range(NUM_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    print("here it comes", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
