"""One connection: notes of bounded length and bodies of any, each within a deadline."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightning_loco.clock import REAL_CLOCK, Clock

MAX_NOTE_BYTES = 1024
"""The longest note."""

_HEAD = struct.Struct("<8sIQ")  # what it is, bytes of the note, bytes of the body
_MAGIC = b"LOCO\0\0\0\2"
_TICK_S = 0.1
_KEEPALIVE_S = 10

Body = memoryview | bytes | bytearray


class MalformedMessage(ConnectionError):
    """What has come is no message of this protocol, so that the connection is of no use."""


class CertificateRefused(ConnectionError):
    """One side holds another certificate than the other, or none; the text is TLS's reason."""


class Connection:
    """Sends and receives messages over a connected socket; for one thread, but for :meth:`abort`.

    A message is a note and perhaps a body, whose bytes are received where the caller wants them.
    Until all of a body was received nothing else can be, and a message that fails midway leaves a
    connection of no use: close it.

    Args:
        connected: Belongs to this connection from now on.
        context: Of TLS; None for none.
        server_side: Which side of TLS this is.
        clock: Says when a deadline is over.
    """

    def __init__(
        self,
        connected: socket.socket,
        context: ssl.SSLContext | None,
        *,
        server_side: bool,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # notice a machine that has gone
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S)
        if context is not None:
            connected = context.wrap_socket(
                connected, server_side=server_side, do_handshake_on_connect=False
            )
        self._socket = connected
        self._clock = clock
        self._is_aborted = False
        self._body_left = 0

    def handshake(self, timeout_s: float) -> None:
        """Prove that both sides hold the certificate, if there is one.

        A client learns only from its first reply whether the server accepts its certificate.

        Raises:
            TimeoutError: If it takes longer.
            CertificateRefused: If the other side holds another certificate, or none.
            OSError: If the connection breaks.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(_TICK_S)
            self._repeat(self._socket.do_handshake, self._clock.now() + timeout_s)

    def send(self, note: bytes, body: Body = b"", *, timeout_s: float) -> None:
        """Send a message.

        Raises:
            TimeoutError: If it takes longer.
            OSError: If the connection breaks.
        """
        if len(note) > MAX_NOTE_BYTES:
            raise ValueError(f"A note has at most {MAX_NOTE_BYTES} bytes, this has {len(note)}.")
        data = memoryview(body).cast("B")
        deadline = self._clock.now() + timeout_s
        self._socket.settimeout(_TICK_S)
        self._send(memoryview(_HEAD.pack(_MAGIC, len(note), len(data)) + note), deadline)
        self._send(data, deadline)

    def _send(self, data: memoryview, deadline: float) -> None:
        while data:
            data = data[self._repeat(partial(self._socket.send, data), deadline) :]

    def receive_note(self, *, timeout_s: float, idle: bool = False) -> tuple[bytes, int]:
        """Receive the note of a message.

        Args:
            timeout_s: The longest time.
            idle: Count it from the first byte on, and wait for that for ever.

        Returns:
            The note, and how many bytes its body has; receive these next.

        Raises:
            MalformedMessage: If no message comes but something else.
            TimeoutError: If it takes longer.
            OSError: If the connection breaks.
        """
        head = memoryview(bytearray(_HEAD.size))
        count = 0
        if idle:
            self._socket.settimeout(None)
            count = self._receive(head, math.inf)
        self._socket.settimeout(_TICK_S)
        deadline = self._clock.now() + timeout_s
        self._fill(head[count:], deadline)
        magic, note_bytes, body_bytes = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise MalformedMessage("it does not begin like a message of this version")
        if note_bytes > MAX_NOTE_BYTES:
            raise MalformedMessage(f"a note of {note_bytes} bytes")
        note = bytearray(note_bytes)
        self._fill(memoryview(note), deadline)
        self._body_left = body_bytes
        return bytes(note), body_bytes

    def receive_into(self, memory: memoryview, *, timeout_s: float) -> None:
        """Receive the next bytes of a body, as many as there is memory for.

        Raises:
            ValueError: If so many are not left.
            TimeoutError: If it takes longer.
            OSError: If the connection breaks.
        """
        memory = memory.cast("B")
        if len(memory) > self._body_left:
            raise ValueError(f"The body has {self._body_left} bytes left, not {len(memory)}.")
        self._fill(memory, self._clock.now() + timeout_s)
        self._body_left -= len(memory)

    @property
    def body_left(self) -> int:
        """Bytes of the body that were not received yet."""
        return self._body_left

    def _fill(self, memory: memoryview, deadline: float) -> None:
        while memory:
            memory = memory[self._receive(memory, deadline) :]

    def _receive(self, memory: memoryview, deadline: float) -> int:
        count = self._repeat(partial(self._socket.recv_into, memory), deadline)
        if not count:
            kind = ConnectionAbortedError if self._is_aborted else ConnectionResetError
            raise kind("the connection was closed")
        return count

    def _repeat(self, operation: Callable[[], int | None], deadline: float) -> int:
        """Call it until it has done something, for as long as there is time."""
        while True:
            if self._is_aborted:
                raise ConnectionAbortedError("the connection was given up")
            if self._clock.now() > deadline:
                raise TimeoutError("the other side is too slow")
            try:
                return operation() or 0
            except TimeoutError as error:
                if error.errno is not None:  # the operating system's, which has given up
                    raise ConnectionResetError("the other side does not answer") from None
            except OSError as error:
                if not self._is_aborted:
                    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                        raise CertificateRefused(error.reason or str(error)) from None
                    raise

    @property
    def is_quiet(self) -> bool:
        """Whether the connection stands and nothing has come that was not received."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._body_left == 0 and not poll.poll(0)

    def abort(self) -> None:
        """Have what is under way, and all that follows, fail at once; for any thread."""
        self._is_aborted = True
        with suppress(OSError):
            # Not the method of SSLSocket, after which ciphertext is received as if it were plain.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._socket.close()
