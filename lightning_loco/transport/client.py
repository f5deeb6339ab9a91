"""The side that asks."""

from __future__ import annotations

import errno
import os
import select
import socket

from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.transport.certificate import JobCertificate
from lightning_loco.transport.connection import Body, Connection

_TICK_MS = 100


class Reply:
    """What a server has answered: a note, and a body that is still to be received.

    Attributes:
        note: At most ``MAX_NOTE_BYTES`` bytes.
        body_bytes: Length of the body.
    """

    def __init__(self, connection: Connection, note: bytes, body_bytes: int) -> None:
        self._connection = connection
        self.note = note
        self.body_bytes = body_bytes

    def receive_into(self, memory: memoryview, *, timeout_s: float) -> None:
        """Receive the next bytes of the body, as many as there is memory for.

        Raises:
            ValueError: If so many are not left.
            TimeoutError: If it takes longer; make no further request until it was closed.
            OSError: If the connection breaks.
        """
        self._connection.receive_into(memory, timeout_s=timeout_s)


class Client:
    """Asks one server; for one thread, but for :meth:`abort`.

    The connection is made by the first request and kept. One that the server has closed, or over
    which comes what was not asked for, is made anew by the next request.

    Args:
        host: Name or address of the server.
        port: Where it listens.
        certificate: Of the job, if it has one.
        clock: Says when a deadline is over.
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

    def request(self, note: bytes, body: Body = b"", *, timeout_s: float) -> Reply:
        """Send a request and receive the note of its reply.

        Args:
            note: At most ``MAX_NOTE_BYTES`` bytes.
            body: Bytes of any number.
            timeout_s: The longest time until the reply's note is there, connecting included.

        Returns:
            The reply. If its body is not received whole, the connection is closed by the next
            request.

        Raises:
            MalformedMessage: If no reply comes but something else.
            CertificateRefused: If the server holds another certificate, or none.
            TimeoutError: If it takes longer.
            OSError: If there is no connection, or it breaks.
        """
        deadline = self._clock.now() + timeout_s
        connection = self._connect(deadline)
        try:
            connection.send(note, body, timeout_s=deadline - self._clock.now())
            reply = connection.receive_note(timeout_s=deadline - self._clock.now())
        except BaseException:
            self.close()
            raise
        return Reply(connection, *reply)

    def _connect(self, deadline: float) -> Connection:
        """The connection from before if it still stands, else a new one."""
        if self._connection is not None and not self._connection.is_quiet:
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
                self._check_wanted()
                self._connection.handshake(deadline - self._clock.now())
            except BaseException:
                self.close()
                raise
        self._check_wanted()
        return self._connection

    def _check_wanted(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError("the connection was given up")

    def _open(self, deadline: float) -> socket.socket:
        """Connect to the first address of the host that answers."""
        found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(found, 1):
            opened = socket.socket(family, kind, protocol)
            try:
                self._await_connection(opened, address, deadline)
            except BaseException as error:
                opened.close()
                is_last = number == len(found) or isinstance(error, TimeoutError)
                if is_last or not isinstance(error, OSError):
                    raise
            else:
                return opened
        raise OSError(errno.EHOSTUNREACH, f"{self._address[0]} has no address")

    def _await_connection(
        self, opened: socket.socket, address: tuple[object, ...], deadline: float
    ) -> None:
        opened.setblocking(False)
        code = opened.connect_ex(address)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(opened, select.POLLOUT)
            while not poll.poll(_TICK_MS):
                self._check_wanted()
                if self._clock.now() > deadline:
                    raise TimeoutError("nobody answers there")
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def abort(self) -> None:
        """Have the request under way, and all that follow, fail at once; for any thread."""
        self._is_aborted = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        """Close the connection, if there is one; the next request makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
