"""The client: sends requests over one connection and receives the replies."""

from __future__ import annotations

import errno
import os
import select
import socket

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.transport.certificate import JobCertificate
from lightning_loco.transport.connection import Body, Connection

_TICK_MS = 100


class Reply:
    """The reply of a server: its header, and a body that is still to be received.

    Attributes:
        header: At most ``MAX_HEADER_BYTES`` bytes.
        body_bytes: Length of the body in bytes.
    """

    def __init__(self, connection: Connection, header: bytes, body_bytes: int) -> None:
        self._connection = connection
        self.header = header
        self.body_bytes = body_bytes

    def receive_into(self, memory: memoryview, *, timeout_s: float) -> None:
        """Receive the next ``len(memory)`` bytes of the body; ValueError if fewer are left.

        TimeoutError if it takes longer: close the client before its next request. OSError if the
        connection breaks.
        """
        self._connection.receive_into(memory, timeout_s=timeout_s)


class Client:
    """A client of one server. Not thread-safe, except for :meth:`abort`.

    The first request opens a connection, which is kept for later ones. The next request reconnects
    if the server has closed the connection or has sent something that was not requested.

    Args:
        host: Name or address of the server.
        port: Port of the server.
        certificate: Certificate of the job. Default: no encryption.
        clock: Clock of the deadlines.
    """

    def __init__(
        self,
        host: str,
        port: int,
        certificate: JobCertificate | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._address = (host, port)
        self._context = None if certificate is None else certificate.client
        self._clock = clock
        self._connection: Connection | None = None
        self._is_aborted = False

    def request(self, header: bytes, body: Body = b"", *, timeout_s: float) -> Reply:
        """Send a request and receive the header of its reply.

        Args:
            header: At most ``MAX_HEADER_BYTES`` bytes.
            body: Any number of bytes.
            timeout_s: Longest time until the header of the reply has arrived, in seconds. It
                includes connecting.

        Returns:
            The reply. Unless its whole body is received, the next request opens a new connection.

        Raises:
            MalformedMessage: If the server sends anything but a reply.
            CertificateRefused: If the server has another certificate, or none.
            TimeoutError: If it takes longer.
            OSError: If the connection cannot be opened, or breaks.
        """
        deadline = self._clock.now() + timeout_s
        connection = self._connect(deadline)
        try:
            connection.send(header, body, timeout_s=deadline - self._clock.now())
            reply = connection.receive_header(timeout_s=deadline - self._clock.now())
        except BaseException:
            self.close()
            raise
        return Reply(connection, *reply)

    def _connect(self, deadline: float) -> Connection:
        """Return the open connection if it is still usable, or open a new one."""
        if self._connection is not None and not self._connection.is_idle:
            self.close()
        if self._connection is None:
            connected = self._open(deadline)
            try:
                self._connection = Connection(
                    connected, self._context, server_side=False, clock=self._clock
                )
            except BaseException:
                connected.close()
                raise
            try:
                self._check_not_aborted()
                self._connection.handshake(deadline - self._clock.now())
            except BaseException:
                self.close()
                raise
        self._check_not_aborted()
        return self._connection

    def _check_not_aborted(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError("the connection was aborted")

    def _open(self, deadline: float) -> socket.socket:
        """Connect to the first address of the host that accepts the connection."""
        found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(found, 1):
            opened = socket.socket(family, kind, protocol)
            try:
                self._wait_until_connected(opened, address, deadline)
            except BaseException as error:
                opened.close()
                is_last = number == len(found) or isinstance(error, TimeoutError)
                if is_last or not isinstance(error, OSError):
                    raise
            else:
                return opened
        raise OSError(errno.EHOSTUNREACH, f"{self._address[0]} has no address")

    def _wait_until_connected(
        self, opened: socket.socket, address: tuple[object, ...], deadline: float
    ) -> None:
        opened.setblocking(False)
        code = opened.connect_ex(address)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(opened, select.POLLOUT)
            while not poll.poll(_TICK_MS):
                self._check_not_aborted()
                if self._clock.now() > deadline:
                    raise TimeoutError("the server does not answer")
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def abort(self) -> None:
        """Make the current request and all later ones fail immediately. Thread-safe."""
        self._is_aborted = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        """Close the connection, if it is open. The next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
