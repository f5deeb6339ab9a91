"""TCP among the hosts of a run, for the modules that use ``socket`` and ``select``.

Few bytes are on their way at a time, so a message is sent in several pieces, each of which arrives
as an event. A killed process closes its connections; a machine that vanished says nothing more.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning_loco.transport import client, connection, request_server
from tests.exploration.scheduler import Event, Scheduler

HOST = "127.0.0.1"
_FIRST_PORT = 4000


class Sockets:
    """The network: who is connected with whom, what listens where, and what is cut.

    Args:
        scheduler: Lets what is sent arrive.
        piece_bytes: Most bytes on their way, and most that have arrived and were not read.

    Attributes:
        cut: Pairs of hosts between which nothing arrives.
    """

    def __init__(self, scheduler: Scheduler, piece_bytes: int) -> None:
        self.scheduler, self.piece_bytes = scheduler, piece_bytes
        self.cut: set[tuple[str, str]] = set()
        self._vanished: set[str] = set()
        self._connecting: list[Callable[[], None]] = []  # what is sent again when it may arrive
        self._sockets: list[Socket] = []
        self._hosts: dict[int, str] = {}  # which host listens at a port, or did
        self._ports = itertools.count(_FIRST_PORT)
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------- faults

    def cut_off(self, one: str, other: str) -> None:
        """Let nothing arrive between two hosts until :meth:`heal`."""
        self.cut |= {(one, other), (other, one)}

    def heal(self, one: str, other: str) -> None:
        """Let arrive what is on its way between two hosts."""
        self.cut -= {(one, other), (other, one)}
        self._send_again()

    def end(self, host: str, *, says_so: bool) -> None:
        """Close the sockets of a host whose process was killed, or whose machine vanished."""
        if not says_so:
            self._vanished.add(host)
        for each in [one for one in self._sockets if one.host == host]:
            each.close()

    def restart(self, host: str) -> None:
        """Let a machine that vanished answer again; it knows none of its connections."""
        if host in self._vanished:
            self._vanished.discard(host)
            for each in self._sockets:
                if each.other is not None and each.other.host == host:
                    each.broken = errno.ECONNRESET
        self._send_again()

    def _send_again(self) -> None:
        for each in self._sockets:
            each.pump()
        again, self._connecting = self._connecting, []
        for connect in again:
            connect()

    def connect(self, name: str, socket: Socket, port: int) -> None:
        """Connect a socket with what listens at a port; it takes until an event."""

        def connect() -> None:
            if socket.is_closed:
                return
            if self.is_silent(socket.host, self._hosts.get(port, socket.host)):
                self._connecting.append(again)
            elif (listener := self.listener_at(port)) is None:
                socket.broken = errno.ECONNREFUSED
            else:
                socket.join(accepted := self.new(listener.host))
                listener.backlog.append(accepted)

        def again() -> None:
            self.scheduler.post(name, connect)

        again()

    def is_silent(self, *hosts: str) -> bool:
        """Whether one of these hosts has vanished, or they are cut off from each other."""
        return any(host in self._vanished for host in hosts) or hosts in self.cut

    # ------------------------------------------------------------------- sockets

    def new(self, host: str) -> Socket:
        """Return a new socket of a host."""
        self._sockets = [one for one in self._sockets if not one.is_forgotten]
        self._sockets.append(found := Socket(self, host, next(self._numbers)))
        return found

    def listener_at(self, port: int) -> Socket | None:
        """Return what listens at a port."""
        found = (one for one in self._sockets if one.port == port and not one.is_closed)
        return next(found, None)

    def free_port(self) -> int:
        """Return a port that was not used before."""
        return next(self._ports)

    def _listen(self, address: tuple[str, int], **_: Any) -> Socket:
        port = address[1] or self.free_port()
        host = self.scheduler.current.host
        if self.listener_at(port) is not None:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        found = self.new(host)
        found.port, self._hosts[port] = port, host
        return found

    def _pair(self) -> tuple[Socket, Socket]:
        one, other = (self.new(self.scheduler.current.host) for _ in range(2))
        one.join(other)
        one.is_local = other.is_local = True
        return one, other

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A context in which the modules of the transport use this network."""

        class HostSocket(Socket):
            def __new__(cls, *_: Any) -> Any:
                return sockets.new(sockets.scheduler.current.host)

        sockets = self
        names = ("SOCK_STREAM", "AF_INET", "AF_INET6", "IPPROTO_TCP", "TCP_NODELAY", "SOL_SOCKET")
        names += ("SO_KEEPALIVE", "SO_ERROR", "SHUT_RDWR")
        for_sockets = SimpleNamespace(
            **dict.fromkeys(names, 0),
            socket=HostSocket,
            create_server=self._listen,
            socketpair=self._pair,
            getaddrinfo=lambda host, port, type: [(0, 0, 0, "", (host, port))],
            has_dualstack_ipv6=lambda: False,
        )
        for_select = SimpleNamespace(poll=lambda: Poll(self.scheduler), POLLIN=1, POLLOUT=4)
        with ExitStack() as stack:
            for module in (client, connection, request_server):
                change = mock.patch.multiple(module, socket=for_sockets, select=for_select)
                stack.enter_context(change)
            yield


class Socket:
    """One end of a connection, or a listener."""

    def __init__(self, network: Sockets, host: str, number: int) -> None:
        self.network, self.host, self.number = network, host, number
        self.other: Socket | None = None
        self.port = 0
        self.backlog: list[Socket] = []
        self.received = bytearray()
        self.is_closed = self.is_shut = self.is_at_end = self.is_local = False
        self.broken = 0
        self._on_the_way = bytearray()
        self._ends = False
        self._event: Event | None = None
        self._timeout_s = math.inf

    def join(self, other: Socket) -> None:
        """Connect with another socket."""
        self.other, other.other = other, self

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.is_closed and self._event is None and not self._on_the_way

    # ------------------------------------------------------------ bytes on their way

    def pump(self) -> None:
        """Let the next piece arrive at the other side, if there is one and room for it."""
        other = self.other
        if other is None or self._event is not None:
            return
        has_room = len(other.received) < self.network.piece_bytes or other.is_closed
        if not ((self._on_the_way and has_room) or (self._ends and not self._on_the_way)):
            return
        if self.network.is_silent(self.host, other.host) and not self.is_local:
            return
        self._event = self.network.scheduler.post(
            f"{self.host} to {other.host} {self.number}", self._arrive
        )

    def _arrive(self) -> None:
        self._event, other = None, self.other
        assert other is not None
        if self.network.is_silent(self.host, other.host):
            return
        if other.is_closed and self._on_the_way:  # nobody reads it
            self._on_the_way.clear()
            self.broken = errno.ECONNRESET
        count = self.network.piece_bytes - len(other.received)
        other.received += self._on_the_way[:count]
        del self._on_the_way[:count]
        if self._ends and not self._on_the_way:
            other.is_at_end, self._ends = True, False
        self.pump()

    # ------------------------------------------------------------ what a program calls

    def setsockopt(self, *_: Any) -> None:
        """Do nothing."""

    def getsockopt(self, *_: Any) -> int:
        """Return the error of connecting."""
        return self.broken

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of each operation."""
        self._timeout_s = math.inf if seconds is None else seconds

    def setblocking(self, flag: bool) -> None:
        """Wait for ever, or not at all."""
        self._timeout_s = math.inf if flag else 0.0

    def getsockname(self) -> tuple[str, int]:
        """Return the address at which it listens."""
        return HOST, self.port

    def connect_ex(self, address: tuple[str, int]) -> int:
        """Start to connect; it takes until an event."""
        self.network.connect(f"{self.host} connects {self.number}", self, address[1])
        return errno.EINPROGRESS

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        """Return the next connection."""
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self.backlog.pop(0), (HOST, 0)

    def send(self, data: bytes | memoryview) -> int:
        """Send some of the bytes, once there is room."""
        most = self.network.piece_bytes
        self._wait("room to send", lambda: len(self._on_the_way) < most or self._fails)
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._fails:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        assert self.other is not None
        if self.is_local:
            self.other.received += data
            return len(data)
        piece = data[: most - len(self._on_the_way)]
        self._on_the_way += piece
        self.pump()
        return len(piece)

    def recv_into(self, memory: memoryview) -> int:
        """Receive what has arrived; 0 at the end."""
        self._wait("bytes", lambda: self.is_readable or self.is_closed)
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.received:
            count = min(len(memory), len(self.received))
            memory[:count] = self.received[:count]
            del self.received[:count]
            assert self.other is not None
            self.other.pump()
            return count
        if self.broken:
            raise ConnectionResetError(self.broken, os.strerror(self.broken))
        return 0

    def shutdown(self, _: int) -> None:
        """End both directions."""
        if self.other is None or self.is_closed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self.is_at_end = True
        self._end()

    def close(self) -> None:
        """Close it; the other side reads to the end, unless something was not read here."""
        if self.is_closed:
            return
        self.is_closed = True
        for one in self.backlog:
            one.close()
        if self.received and self.other is not None and not self.is_local:
            self._on_the_way.clear()
        self._end()

    def _end(self) -> None:
        if not self.is_shut:
            self.is_shut = self._ends = True
            self.pump()

    @property
    def _fails(self) -> bool:
        return bool(self.broken or self.is_shut or self.is_closed)

    @property
    def is_readable(self) -> bool:
        """Whether reading, or accepting, does not block."""
        return bool(self.received or self.is_at_end or self.broken or self.backlog)

    @property
    def is_connected(self) -> bool:
        """Whether connecting has ended, also with an error."""
        return self.other is not None or bool(self.broken)

    def _wait(self, why: str, until: Callable[[], bool]) -> None:
        if not until() and not self.network.scheduler.wait(why, until, self._timeout_s):
            raise TimeoutError("timed out")


class Poll:
    """Waits until one of several sockets is ready."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._registered: list[tuple[Socket, int]] = []

    def register(self, socket: Socket, flags: int) -> None:
        """Wait for this socket, too: until it is readable (1) or has connected (4)."""
        self._registered.append((socket, flags))

    def poll(self, timeout_ms: float | None = None) -> list[Socket]:
        """Return the sockets that are ready, once there is one."""
        if timeout_ms != 0 and not self._ready():
            limit_s = math.inf if timeout_ms is None else timeout_ms / 1000
            self._scheduler.wait("a socket", lambda: bool(self._ready()), limit_s)
        return self._ready()

    def _ready(self) -> list[Socket]:
        return [
            one
            for one, flags in self._registered
            if (one.is_readable if flags == 1 else one.is_connected)
        ]


def pairs(hosts: Iterable[str]) -> list[tuple[str, str]]:
    """Return all pairs of hosts."""
    return list(itertools.combinations(hosts, 2))
