"""The side that answers: bounded connections, each with a thread of its own."""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_loco.background import BackgroundThread
from lightning_loco.transport.certificate import JobCertificate
from lightning_loco.transport.connection import (
    Body,
    CertificateRefused,
    Connection,
    MalformedMessage,
)

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_NOTE_S = 5.0
_NAP_S = 0.01
_CLOSE_S = 5.0
_BACKLOG = 100
_MOST_LOG_LINES = 20


class Request:
    """What a client asks, and the way to answer it.

    Attributes:
        note: At most ``MAX_NOTE_BYTES`` bytes.
        body_bytes: Length of the body that comes with it.
        address: Where the client is.
    """

    def __init__(
        self, connection: Connection, note: bytes, body_bytes: int, address: str, timeout_s: float
    ) -> None:
        self.note = note
        self.body_bytes = body_bytes
        self.address = address
        self.is_answered = False
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s

    def receive_into(self, memory: memoryview) -> None:
        """Receive the next bytes of the body, as many as there is memory for.

        Raises:
            ValueError: If so many are not left.
            OSError: If the connection breaks or the client is too slow; let it pass.
        """
        self._connection.receive_into(memory, timeout_s=self._deadline - time.monotonic())

    def reply(self, note: bytes, body: Body = b"") -> None:
        """Answer, once, when all of the body was received.

        Args:
            note: At most ``MAX_NOTE_BYTES`` bytes.
            body: Must stay as it is until this returns.

        Raises:
            OSError: If the connection breaks or the client is too slow; let it pass.
        """
        if self.is_answered or self._connection.body_left:
            raise RuntimeError("A request is answered once, when its body was received.")
        self.is_answered = True
        self._connection.send(note, body, timeout_s=self._deadline - time.monotonic())


class Server(BackgroundThread):
    """Answers whoever connects, or whoever holds the certificate; at most so many at once.

    When there is one connection too many, the one that has gone without a request for the longest
    is closed, those that have never made one first. So whoever only holds connections loses them to
    those who come. A client has 5 seconds for the handshake, as many for a note, and ``timeout_s``
    for the bodies of a request and its reply. Whoever exceeds that, or sends what is no request,
    loses its connection, and each such address has a line in the log, up to 20 lines.

    Args:
        answer: Called with every request, in the thread of its connection. If it raises
            :class:`MalformedMessage`, or does not answer, the connection is closed.
        host: Address to listen at; ``"0.0.0.0"`` for all networks of this machine.
        port: Port to listen at, 0 for any that is free.
        certificate: Of the job, if it has one.
        max_connections: At once, at least 1.
        timeout_s: The longest time for a request and its reply, in seconds.

    Attributes:
        port: Where it listens.
        malformed: Connections that were closed for what came over them.

    Raises:
        RuntimeError: If the port is taken or the host is not an address of this machine.

    Example:
        >>> server = Server(lambda request: request.reply(b"echo " + request.note))
        >>> server.start()
        >>> from lightning_loco.transport.client import Client
        >>> client = Client("127.0.0.1", server.port)
        >>> client.request(b"hello", timeout_s=5).note
        b'echo hello'
        >>> client.close()
        >>> server.close()
    """

    def __init__(
        self,
        answer: Callable[[Request], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: JobCertificate | None = None,
        max_connections: int = 64,
        timeout_s: float = 30.0,
    ) -> None:
        super().__init__("loco-server")
        self.malformed = 0
        self._answer = answer
        self._tls = None if certificate is None else certificate.server
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._serving: set[_Serving] = set()
        self._order = itertools.count()
        self._logged: set[str] = set()
        self._is_closing = False
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._alarm, self._alarmed = socket.socketpair()

    def run(self) -> None:
        """Accept connections until closed."""
        try:
            poll = select.poll()
            for each in (self._listener, self._alarmed):
                poll.register(each, select.POLLIN)
            while not self._is_closing:
                poll.poll()
                if not self._is_closing:
                    self._accept()
        except Exception:
            log.exception("The server at port %d has ended.", self.port)
        finally:
            self._listener.close()

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError as error:
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            if is_full and not self._evict():
                time.sleep(_NAP_S)  # it would be called again at once
            return
        while len(self._serving) >= self._max_connections and self._evict():
            pass
        try:
            connection = Connection(accepted, self._tls, server_side=True)
        except OSError:  # it has gone already
            accepted.close()
            return
        serving = _Serving(self, connection, str(address[0]), next(self._order))
        with self._lock:
            self._serving.add(serving)
        serving.start()

    def _evict(self) -> bool:
        """Close the connection that was idle for the longest; whether there was any."""
        with self._lock:
            if not self._serving:
                return False
            idlest = min(self._serving, key=lambda each: (each.has_asked, each.order))
        idlest.connection.abort()
        idlest.join(_CLOSE_S)
        with self._lock:
            self._serving.discard(idlest)
        return True

    def serve(self, serving: _Serving) -> None:
        """Answer the requests of one connection until it breaks; in its thread."""
        connection = serving.connection
        try:
            connection.handshake(_HANDSHAKE_S)
            while True:
                note, body_bytes = connection.receive_note(timeout_s=_NOTE_S, idle=True)
                serving.has_asked, serving.order = True, next(self._order)
                request = Request(connection, note, body_bytes, serving.address, self._timeout_s)
                self._answer(request)
                if not request.is_answered:
                    raise MalformedMessage("there is no answer to it")
        except MalformedMessage as error:
            self._note_malformed(serving.address, str(error))
        except CertificateRefused as error:
            self._note_malformed(serving.address, f"no key file of this job ({error})")
        except OSError:
            pass
        except Exception:
            log.exception("A request from %s could not be answered.", serving.address)
        finally:
            with self._lock:
                self._serving.discard(serving)
            connection.close()

    def _note_malformed(self, address: str, error: str) -> None:
        with self._lock:
            self.malformed += 1
            is_known = address in self._logged or len(self._logged) >= _MOST_LOG_LINES
            self._logged.add(address)
        if not is_known:
            log.warning(
                "Dropped a message from %s on port %d: %s. Further ones from there are dropped "
                "without a line here.",
                address,
                self.port,
                error,
            )

    def close(self) -> None:
        """Close all connections, free the port and end all threads; a second call does nothing."""
        self._tell_to_end()
        if self.is_alive():
            self.join()
        self._listener.close()
        with self._lock:
            serving = list(self._serving)
        for each in serving:
            each.connection.abort()
        for each in serving:
            each.join(_CLOSE_S)
        self._alarm.close()
        self._alarmed.close()

    def _tell_to_end(self) -> None:
        self._is_closing = True
        with suppress(OSError):
            self._alarm.send(b"!")

    def end_with_process(self) -> float:
        """Accept nobody any more."""
        self._tell_to_end()
        return super().end_with_process()


class _Serving(BackgroundThread):
    """One connection and the thread that answers it."""

    def __init__(self, server: Server, connection: Connection, address: str, order: int) -> None:
        super().__init__("loco-server-connection")
        self.connection = connection
        self.address = address
        self.order = order  # the later it came or the more lately it has asked, the larger
        self.has_asked = False
        self._server = server

    def run(self) -> None:
        """Answer until the connection breaks."""
        self._server.serve(self)

    def end_with_process(self) -> float:
        """Give up the connection."""
        self.connection.abort()
        return super().end_with_process()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"Port {port} of {host} is taken, so this worker cannot listen there. End "
                "the process that listens on it, choose another port for this worker, or "
                "leave the port out to get a free one."
            ) from None
        raise RuntimeError(
            f"Cannot listen on port {port} of {host!r}: {error}. Use host='0.0.0.0' for all "
            "networks of this machine, or one of its own addresses."
        ) from None
