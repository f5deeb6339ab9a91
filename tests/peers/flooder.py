"""Somebody who floods: ``python flooder.py connect|listen|listen_idle PORT SECONDS``.

In a process of its own, so that the memory of the one who is flooded is measured alone; it imports
nothing of ours, to be there soon. What it sends comes as hexadecimal lines: the flood, a reply that
says that there is nothing to read yet, and the job's two keys if it has them.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


class Plain:
    """A connection without keys, once both sides are ready."""

    def __init__(self, connection: socket.socket, kind: bytes) -> None:
        self._connection = connection
        connection.sendall(GREETING + READY + kind)
        read(connection, 64)
        read(connection, read(connection, 2)[1])

    def send(self, frames: bytes) -> None:
        self._connection.sendall(frames)

    def receive(self) -> bytes:
        """The body of the next frame, a short one."""
        return read(self._connection, read(self._connection, 2)[1])


Greet = Callable[[socket.socket, bytes], Any]
"""Makes a new connection one that frames go over, for a kind of socket."""


greetings: list[bytes] = []
"""The kinds of sockets that others have been greeted as, without an error."""


def say_empty(line: Any, reply: bytes) -> None:
    """Answer the first request that there is nothing to read yet."""
    request = line.receive()
    line.send(frame(reply[: NUMBER.start] + request[NUMBER] + reply[NUMBER.stop :]))


def pour(line: Any, flood: bytes, until: float) -> None:
    """Send the same again and again until the other side closes."""
    while time.monotonic() < until:
        line.send(flood)


def connect_and_pour(greet: Greet, port: int, flood: bytes, until: float) -> None:
    """As a client who never reads, and comes again when it is closed."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)) as connection:
            connection.settimeout(0.5)
            line = greet(connection, b"DEALER")
            greetings.append(b"DEALER")
            pour(line, flood, until)


def listen_and_pour(
    greet: Greet, port: int, flood: bytes, until: float, reply: bytes | None
) -> None:
    """As a peer, after an answer as it should be if there is one."""
    with socket.create_server((HOST, port)) as server:
        server.settimeout(0.1)
        print("here it comes", flush=True)
        while time.monotonic() < until:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(0.5)
                line = greet(connection, b"ROUTER")
                greetings.append(b"ROUTER")
                if reply is not None:
                    say_empty(line, reply)
                pour(line, flood, until)


@contextlib.contextmanager
def flooding(
    role: str, port: int, flood: bytes, seconds: float, reply: bytes = b"", keys: bytes = b""
) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun, and is ended if it has not yet; at its end it prints the number of
    its greetings.

    ``keys`` are the public one and the secret one, of 32 bytes each.
    """
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), role, str(port), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{flood.hex()}\n{reply.hex()}\n{keys.hex()}\n")
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
    flood, reply, keys = (bytes.fromhex(line.strip()) for line in sys.stdin)
    greet: Greet = Plain
    if keys:
        from curve import Curve  # of this folder, where the program is

        greet = functools.partial(Curve, public=keys[:32], secret=keys[32:])
    until = time.monotonic() + seconds
    if role != "connect":
        listen_and_pour(greet, port, flood, until, reply if role == "listen_idle" else None)
        print(len(greetings))
        return
    arguments = (greet, port, flood, until)
    threads = [
        threading.Thread(target=connect_and_pour, args=arguments) for _ in range(NUM_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    print("here it comes", flush=True)
    for thread in threads:
        thread.join()
    print(len(greetings))


if __name__ == "__main__":
    main()
