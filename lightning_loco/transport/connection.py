"""A connection: sends and receives messages, each within a deadline."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightning_loco._util.clock import REAL_CLOCK, Clock

MAX_HEADER_BYTES = 1024
"""Longest header of a message, in bytes."""

_PREFIX = struct.Struct("<8sIQ")  # magic, bytes of the header, bytes of the body
_MAGIC = b"LOCO\0\0\0\2"
_TICK_S = 0.1
_KEEPALIVE_S = 10

Body = memoryview | bytes | bytearray


class MalformedMessage(ConnectionError):
    """The other side violates the protocol. The connection can no longer be used."""


class CertificateRefused(ConnectionError):
    """The certificate of one side is refused by the other one. The text says why."""


class Connection:
    """Sends and receives messages over a socket. Not thread-safe, except for :meth:`abort`.

    A message is a header and an optional body, which is received into memory of the caller. The
    whole body must be received before the next message. Methods raise TimeoutError if they take
    longer than ``timeout_s`` seconds, and OSError if the connection breaks. After an error in the
    middle of a message the connection cannot be used any more and must be closed.

    The connected socket is owned and closed by this object. Without a TLS context it is not
    encrypted.
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
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # notice a machine that has disappeared
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
        """Do the TLS handshake, if the connection is encrypted.

        A client learns only from its first reply whether the server has accepted its certificate.
        CertificateRefused if the other side has another certificate, or none, or a clock at which
        this one is not valid.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(_TICK_S)
            self._retry(self._socket.do_handshake, self._clock.now() + timeout_s)

    def send(self, header: bytes, body: Body = b"", *, timeout_s: float) -> None:
        """Send a message."""
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"A header has at most {MAX_HEADER_BYTES} bytes, this has {len(header)}."
            )
        data = memoryview(body).cast("B")
        deadline = self._clock.now() + timeout_s
        self._socket.settimeout(_TICK_S)
        self._send(memoryview(_PREFIX.pack(_MAGIC, len(header), len(data)) + header), deadline)
        self._send(data, deadline)

    def _send(self, data: memoryview, deadline: float) -> None:
        while data:
            data = data[self._retry(partial(self._socket.send, data), deadline) :]

    def receive_header(self, *, timeout_s: float, idle: bool = False) -> tuple[bytes, int]:
        """Receive the header of a message; return it, and the length of the body in bytes.

        The body has to be received next. An ``idle`` connection waits for the first byte without a
        limit and counts ``timeout_s`` from there. MalformedMessage if it is anything but a message.
        """
        prefix = memoryview(bytearray(_PREFIX.size))
        count = 0
        if idle:
            self._socket.settimeout(None)
            count = self._receive(prefix, math.inf)
        self._socket.settimeout(_TICK_S)
        deadline = self._clock.now() + timeout_s
        self._fill(prefix[count:], deadline)
        magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise MalformedMessage("it does not start like a message of this version")
        if header_bytes > MAX_HEADER_BYTES:
            raise MalformedMessage(f"a header of {header_bytes} bytes")
        header = bytearray(header_bytes)
        self._fill(memoryview(header), deadline)
        self._body_left = body_bytes
        return bytes(header), body_bytes

    def receive_into(self, memory: memoryview, *, timeout_s: float) -> None:
        """Receive the next ``len(memory)`` bytes of the body; ValueError if fewer are left."""
        memory = memory.cast("B")
        if len(memory) > self._body_left:
            raise ValueError(f"The body has {self._body_left} bytes left, not {len(memory)}.")
        self._fill(memory, self._clock.now() + timeout_s)
        self._body_left -= len(memory)

    @property
    def body_left(self) -> int:
        """Bytes of the body that have not been received yet."""
        return self._body_left

    def _fill(self, memory: memoryview, deadline: float) -> None:
        while memory:
            memory = memory[self._receive(memory, deadline) :]

    def _receive(self, memory: memoryview, deadline: float) -> int:
        count = self._retry(partial(self._socket.recv_into, memory), deadline)
        if not count:
            kind = ConnectionAbortedError if self._is_aborted else ConnectionResetError
            raise kind("the connection was closed")
        return count

    def _retry(self, operation: Callable[[], int | None], deadline: float) -> int:
        """Call a socket operation again after each socket timeout, until the deadline."""
        while True:
            if self._is_aborted:
                raise ConnectionAbortedError("the connection was aborted")
            if self._clock.now() > deadline:
                raise TimeoutError("the other side is too slow")
            try:
                return operation() or 0
            except TimeoutError as error:
                if error.errno is not None:  # raised by the operating system, not by settimeout
                    raise ConnectionResetError("the other side does not answer") from None
            except OSError as error:
                if not self._is_aborted:
                    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                        raise _cause_of(error) from None
                    raise

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and no unread bytes have arrived."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._body_left == 0 and not poll.poll(0)

    def abort(self) -> None:
        """Make the current operation and all later ones fail immediately. Thread-safe."""
        self._is_aborted = True
        with suppress(OSError):
            # SSLSocket.shutdown would drop the TLS layer, and later reads would return ciphertext.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Calling it again does nothing."""
        self._socket.close()


_BAD_DATES = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED
_ALERTS_OF_DATES = ("CERTIFICATE_EXPIRED", "ALERT_BAD_CERTIFICATE")  # what the other side sends


def _cause_of(error: ssl.SSLError) -> ConnectionError:
    """Return the error of a connection whose TLS has failed."""
    text = getattr(error, "verify_message", None) or error.reason or str(error)
    if text.endswith("BAD_RECORD_MAC"):
        return MalformedMessage(f"bytes were changed on the way ({text})")
    if getattr(error, "verify_code", 0) in _BAD_DATES or text.endswith(_ALERTS_OF_DATES):
        return CertificateRefused(
            f"by the clock of one of the two machines the key file is not valid now ({text})"
        )
    return CertificateRefused(f"it has another key file, or none ({text})")


def address_towards(host: str, port: int = 9) -> str:
    """Return the address of this machine on the network that leads to ``host``.

    Nothing is sent.

    Example:
        >>> address_towards("127.0.0.1")
        '127.0.0.1'
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
