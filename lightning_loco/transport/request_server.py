"""The server: a bounded number of connections, each served by its own thread."""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from lightning_loco._util.background import BackgroundThread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.transport.certificate import JobCertificate
from lightning_loco.transport.connection import (
    Body,
    CertificateRefused,
    Connection,
    MalformedMessage,
)

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_HEADER_S = 5.0
_RETRY_S = 0.01
_CLOSE_S = 5.0
_BACKLOG = 100
_MOST_LOG_LINES = 20
_SCRATCH_BYTES = 2**20


class Request:
    """A request of a client, and the means to reply to it.

    Attributes:
        header: At most ``MAX_HEADER_BYTES`` bytes.
        body_bytes: Length of the body in bytes.
        address: Address of the client.
    """

    def __init__(
        self,
        connection: Connection,
        header: bytes,
        body_bytes: int,
        address: str,
        timeout_s: float,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self.header = header
        self.body_bytes = body_bytes
        self.address = address
        self.is_answered = False
        self._connection = connection
        self._clock = clock
        self._deadline = clock.now() + timeout_s

    def receive_into(self, memory: memoryview) -> None:
        """Receive the next ``len(memory)`` bytes of the body; ValueError if fewer are left.

        OSError if the connection breaks or the client is too slow. Do not catch it.
        """
        self._connection.receive_into(memory, timeout_s=self._deadline - self._clock.now())

    def discard_body(self) -> None:
        """Receive the rest of the body and forget it; errors as in :meth:`receive_into`."""
        scratch = memoryview(bytearray(min(self._connection.body_left, _SCRATCH_BYTES)))
        while left := self._connection.body_left:
            self.receive_into(scratch[:left])

    def reply(self, header: bytes, body: Body = b"") -> None:
        """Send the reply; its body must not change until this returns.

        RuntimeError if it is called twice, or before the whole body has been received. OSError if
        the connection breaks or the client is too slow: do not catch it.
        """
        if self.is_answered or self._connection.body_left:
            raise RuntimeError(
                "A request is answered once, after its whole body has been received."
            )
        self.is_answered = True
        self._connection.send(header, body, timeout_s=self._deadline - self._clock.now())


class Server(BackgroundThread):
    """Answers the requests of clients; with a certificate, only of clients that hold it.

    If a client connects while ``max_connections`` are open, another connection is closed to make
    room: one that has never sent a request if there is any, else the one whose last request is
    longest ago. So clients that only hold connections open cannot keep others out.

    A client has 5 seconds for the handshake, 5 seconds for a header, and ``timeout_s`` for the
    bodies of a request and its reply. If it takes longer or sends anything but a request, its
    connection is closed. Malformed requests are logged, once per address and at most 20 times;
    at most 20 exceptions of ``answer`` are logged.

    Args:
        answer: Called with every request, in the thread of its connection. If it raises
            :class:`MalformedMessage`, or does not reply, the connection is closed.
        host: Address to listen on. ``"0.0.0.0"`` listens on all networks of this machine.
        port: Port to listen on. 0 takes any free one.
        certificate: Certificate of the job. Default: no encryption.
        max_connections: Most open connections, at least 1.
        timeout_s: Longest time for a request and its reply, in seconds.
        clock: Clock of the deadlines.

    Attributes:
        port: Port that the server listens on.
        malformed: Number of connections that were closed because the client violated the protocol.

    Raises:
        RuntimeError: If the port is taken or the host is not an address of this machine.

    Example:
        >>> server = Server(lambda request: request.reply(b"echo " + request.header))
        >>> server.start()
        >>> from lightning_loco.transport.client import Client
        >>> client = Client("127.0.0.1", server.port)
        >>> client.request(b"hello", timeout_s=5).header
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
        clock: Clock = REAL_CLOCK,
    ) -> None:
        super().__init__("loco-server")
        self.malformed = 0
        self._answer = answer
        self._tls = None if certificate is None else certificate.server
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        # Used by the thread of the server alone, and after its end by close().
        self._threads: list[_ConnectionThread] = []
        self._order = itertools.count()
        self._logged: set[str] = set()
        self._num_failures = 0
        self._is_closing = False
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()

    def run(self) -> None:
        """Accept connections until closed."""
        try:
            poll = select.poll()
            for each in (self._listener, self._wakeup_receiver):
                poll.register(each, select.POLLIN)
            while not self._is_closing:
                poll.poll()
                if not self._is_closing:
                    self._accept()
        except Exception:
            log.exception("The server at port %d has stopped.", self.port)
        finally:
            self._listener.close()

    def _accept(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        try:
            accepted, address = self._listener.accept()
        except OSError as error:
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            if is_full and not self._evict():
                self._clock.sleep(_RETRY_S)  # the listener would be readable again immediately
            return
        while len(self._threads) >= self._max_connections and self._evict():
            pass
        try:
            connection = Connection(accepted, self._tls, server_side=True, clock=self._clock)
        except OSError:  # the client has already disconnected
            accepted.close()
            return
        thread = _ConnectionThread(self, connection, str(address[0]), next(self._order))
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread; the client will try again
            self._record_failure(thread.address)
            connection.close()
            return
        self._threads.append(thread)

    def _evict(self) -> bool:
        """Close the connection that has been idle longest. Returns whether there was any."""
        if not self._threads:
            return False
        idlest = min(self._threads, key=lambda thread: (thread.has_requested, thread.order))
        idlest.connection.abort()
        idlest.join(_CLOSE_S)
        self._threads.remove(idlest)
        return True

    def serve(self, thread: _ConnectionThread) -> None:
        """Answer the requests of one connection until it breaks, in its own thread."""
        connection = thread.connection
        try:
            connection.handshake(_HANDSHAKE_S)
            while True:
                header, body_bytes = connection.receive_header(timeout_s=_HEADER_S, idle=True)
                thread.has_requested, thread.order = True, next(self._order)
                request = Request(
                    connection, header, body_bytes, thread.address, self._timeout_s, self._clock
                )
                self._answer(request)
                if not request.is_answered:
                    raise MalformedMessage("the request was not answered")
        except (MalformedMessage, CertificateRefused) as error:
            self._record_malformed(thread.address, str(error))
        except OSError:
            pass
        except Exception:
            self._record_failure(thread.address)
        finally:
            connection.close()

    def _record_failure(self, address: str) -> None:
        """Log the present exception, unless a client has caused many of them before."""
        with self._lock:
            self._num_failures += 1
            number = self._num_failures
        if number <= _MOST_LOG_LINES:
            further = " No more failures are logged." if number == _MOST_LOG_LINES else ""
            log.exception("A request from %s could not be answered.%s", address, further)

    def _record_malformed(self, address: str, error: str) -> None:
        with self._lock:
            is_logged = address in self._logged or len(self._logged) >= _MOST_LOG_LINES
            self._logged.add(address)
        if not is_logged:
            log.warning(
                "Dropped a message from %s on port %d: %s. Further messages from this address are "
                "dropped without a log entry.",
                address,
                self.port,
                error,
            )
        with self._lock:
            self.malformed += 1  # last: who sees the count finds the entry in the log

    def close(self) -> None:
        """Close all connections, free the port and end all threads. Idempotent."""
        self._request_stop()
        if self.is_alive():
            self.join()
        self._listener.close()
        for thread in self._threads:
            thread.connection.abort()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._wakeup_sender.close()
        self._wakeup_receiver.close()

    def _request_stop(self) -> None:
        self._is_closing = True
        with suppress(OSError):
            self._wakeup_sender.send(b"!")

    def end_with_process(self) -> float:
        """Accept no more connections."""
        self._request_stop()
        return super().end_with_process()


class _ConnectionThread(BackgroundThread):
    """The thread that answers the requests of one connection."""

    def __init__(self, server: Server, connection: Connection, address: str, order: int) -> None:
        super().__init__("loco-server-connection")
        self.connection = connection
        self.address = address
        self.order = order  # number of the last request or, before the first one, of the connection
        self.has_requested = False
        self._server = server

    def run(self) -> None:
        """Answer requests until the connection breaks."""
        self._server.serve(self)

    def end_with_process(self) -> float:
        """Abort the connection."""
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
