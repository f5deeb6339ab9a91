"""A connection with keys (CURVE of ZMTP 3.1) by hand, for messages that ZeroMQ would not send.

A socket of ZeroMQ sends a message when all of it is there, so it never sends one without end. What
encrypts is libsodium as pyzmq's wheels bring it; other builds may have it within, out of reach.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils import z85

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"%c" + bytes(31)
METADATA = b"\x0bSocket-Type\0\0\0\6%s\x08Identity\0\0\0\0"
MAC_BYTES = 16
BATCH_BYTES = 2**16


@functools.cache
def sodium() -> ctypes.CDLL | None:
    """The library that ZeroMQ has loaded; None if there is none by itself."""
    assert zmq.has("curve")
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if sys.platform == "linux" else []
    paths = [line.split()[-1] for line in lines if "libsodium" in line]
    return ctypes.CDLL(paths[0]) if paths else None


class Box:
    """What two pairs of keys share: it encrypts and opens."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        library = sodium()
        assert library is not None
        self._seal = library.crypto_box_easy_afternm
        self._open = library.crypto_box_open_easy_afternm
        self._key = ctypes.create_string_buffer(32)
        assert library.crypto_box_beforenm(self._key, public, secret) == 0

    def seal(self, text: bytes, nonce: bytes) -> bytes:
        sealed = ctypes.create_string_buffer(len(text) + MAC_BYTES)
        assert self._seal(sealed, text, ctypes.c_ulonglong(len(text)), nonce, self._key) == 0
        return sealed.raw

    def open(self, sealed: bytes, nonce: bytes) -> bytes:
        text = ctypes.create_string_buffer(len(sealed) - MAC_BYTES)
        count = ctypes.c_ulonglong(len(sealed))
        assert self._open(text, sealed, count, nonce, self._key) == 0, "another key"
        return text.raw


def new_keys() -> tuple[bytes, bytes]:
    """A public and a secret key."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def number(count: int) -> bytes:
    return count.to_bytes(8, "big")


def read(connection: socket.socket, count: int) -> bytes:
    """So many bytes."""
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def read_frame(connection: socket.socket) -> bytes:
    """Of whatever kind."""
    is_long = read(connection, 1)[0] & 2
    return read(connection, int.from_bytes(read(connection, 8 if is_long else 1), "big"))


def framed(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + number(len(body)) + body


def frames(flood: bytes) -> Iterator[tuple[int, bytes]]:
    """Whether more of the message follows, and the body, of frames as they travel without keys."""
    at = 0
    while at < len(flood):
        flags = flood[at]
        start = at + (9 if flags & 2 else 2)
        at = start + int.from_bytes(flood[at + 1 : start], "big")
        yield flags & 1, flood[start:at]


class Curve:
    """One of the two sides, once both are ready.

    Args:
        connection: That is new.
        kind: Of socket: ``b"DEALER"`` for the client, ``b"ROUTER"`` for the server.
        public: The job's, which both sides have.
        secret: The job's.
    """

    def __init__(
        self, connection: socket.socket, kind: bytes, public: bytes, secret: bytes
    ) -> None:
        self._connection = connection
        self._own, self._other = b"CS" if kind == b"DEALER" else b"SC"
        self._count = 2
        connection.sendall(GREETING % (kind == b"ROUTER"))
        read(connection, 64)
        shake = self._as_client if kind == b"DEALER" else self._as_server
        self._box = shake(METADATA % kind, public, secret)

    def _as_client(self, metadata: bytes, public: bytes, secret: bytes) -> Box:
        fleeting, own = new_keys()
        first, nonce = Box(public, own), number(1)
        box = first.seal(bytes(64), b"CurveZMQHELLO---" + nonce)
        self._command(b"\5HELLO\1\0" + bytes(72) + fleeting + nonce + box)
        welcome = read_frame(self._connection)
        opened = first.open(welcome[24:], b"WELCOME-" + welcome[8:24])
        theirs, cookie = opened[:32], opened[32:]
        salt, nonce = os.urandom(16), number(2)
        vouch = Box(theirs, secret).seal(fleeting + public, b"VOUCH---" + salt)
        both = Box(theirs, own)
        box = both.seal(public + salt + vouch + metadata, b"CurveZMQINITIATE" + nonce)
        self._command(b"\x08INITIATE" + cookie + nonce + box)
        assert read_frame(self._connection).startswith(b"\5READY")
        return both

    def _as_server(self, metadata: bytes, public: bytes, secret: bytes) -> Box:
        theirs = read_frame(self._connection)[80:112]
        fleeting, own = new_keys()
        salt, cookie, nonce = os.urandom(16), os.urandom(96), number(1)
        box = Box(theirs, secret).seal(fleeting + cookie, b"WELCOME-" + salt)
        self._command(b"\7WELCOME" + salt + box)
        assert read_frame(self._connection).startswith(b"\x08INITIATE")
        both = Box(theirs, own)
        self._command(b"\5READY" + nonce + both.seal(metadata, b"CurveZMQREADY---" + nonce))
        return both

    def _command(self, body: bytes) -> None:
        self._connection.sendall(framed(body, flags=4))

    def send(self, flood: bytes) -> None:
        """Send frames, given as they would travel without keys."""
        batch = bytearray()
        for flags, body in frames(flood):
            self._count += 1
            nonce = number(self._count)
            box = self._box.seal(bytes([flags]) + body, b"CurveZMQMESSAGE%c" % self._own + nonce)
            batch += framed(b"\7MESSAGE" + nonce + box)
            if len(batch) > BATCH_BYTES:
                self._connection.sendall(batch)
                batch.clear()
        self._connection.sendall(batch)

    def receive(self) -> bytes:
        """The body of the next frame."""
        sealed = read_frame(self._connection)
        assert sealed.startswith(b"\7MESSAGE")
        return self._box.open(sealed[16:], b"CurveZMQMESSAGE%c" % self._other + sealed[8:16])[1:]
