"""Whether the lighthouse has been up for long enough to have heard of all who are alive.

One that was started again knows nobody. It would let those who ask first go on without the others,
and workers that know nothing of the run begin another one.
"""

from __future__ import annotations

import socket
import time

HEARD_S = 1.0
"""After so long a new lighthouse has heard several signs of life of everyone who is not held up."""

_IDLE_S = 10


class Uptime:
    """A connection with the lighthouse that ends when the lighthouse does.

    Args:
        lighthouse: ``"host:port"``.

    Attributes:
        is_closed: Whether this worker takes part no longer.
    """

    def __init__(self, lighthouse: str) -> None:
        host, _, port = lighthouse.removeprefix("http://").rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._line: socket.socket | None = None
        self._since, self._connections = 0.0, 0
        self.is_closed = False

    def wait(self, deadline: float) -> None:
        """Wait until the lighthouse has been up for :data:`HEARD_S`, as far as is known here.

        Args:
            deadline: When to wait no longer, by ``time.monotonic()``.

        Raises:
            ConnectionError: If nobody answers there, or after :meth:`close`.
        """
        while True:
            self.connect(deadline)
            now = time.monotonic()
            left_s = min(self._since + HEARD_S, deadline) - now
            if left_s <= 0:
                return
            time.sleep(left_s)

    def connect(self, deadline: float) -> None:
        """Connect, unless there is a connection; arguments and errors are those of :meth:`wait`."""
        if self._line is None or _has_ended(self._line):
            self._open(deadline)

    def is_new(self, known_s: float) -> bool:
        """Whether this connection followed another one, less than so long ago.

        Those who took part before may then be held up for longer than :data:`HEARD_S`.
        """
        return self._connections > 1 and time.monotonic() - self._since < known_s

    def close(self) -> None:
        """End the connection for good."""
        self.is_closed = True
        self._end()

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _open(self, deadline: float) -> None:
        self._end()
        left_s = max(HEARD_S, deadline - time.monotonic())
        if self.is_closed:
            raise ConnectionAbortedError("this worker takes part no longer")
        try:
            line = socket.create_connection(self._address, timeout=left_s)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        self._line, self._since = line, time.monotonic()
        self._connections += 1


def _has_ended(line: socket.socket) -> bool:
    try:
        line.setblocking(False)
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
