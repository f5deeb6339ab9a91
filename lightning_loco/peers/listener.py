"""Serves clients without keys, over plain connections, in memory that none of them can make grow.

A client has 4 KiB for what it sends and a few requests that wait. While those wait, nothing more is
read from it, so that whoever sends too much fills the buffers of the operating system, which are
bounded, and then his own. Chunks are sent from the memory of the publications.
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import time
from collections import deque
from contextlib import suppress

from lightning_loco.peers.answers import LONGEST_REQUEST_BYTES, MOST_REPLIES_UNDER_WAY, Answers
from lightning_loco.peers.protocol import DATA, Reply, Request, pack_reply
from lightning_loco.peers.zmtp import Handshake, Inbox, frame_head

_HANDSHAKE_S = 5.0
_SILENCE_S = 30.0
_LOOK_S = 1.0
_NAP_S = 0.01
_KEEPALIVE_S = 10
_BACKLOG = 100
_MOST_SENDS = 8  # to one client before it is the next one's turn


class _Client:
    """One connection, what has come over it, and what it is still owed."""

    def __init__(self, connection: socket.socket, address: str, order: int) -> None:
        self.connection = connection
        self.address = address
        self.name = b"%d" % order
        self.order = order  # the later it came or the more lately it has asked, the larger
        self.has_asked = False
        self.handshake = Handshake(b"ROUTER")
        self.inbox = Inbox(self.handshake, LONGEST_REQUEST_BYTES)
        self.requests: deque[Request] = deque()
        self.head = self.handshake.outgoing
        self.reply: Reply | None = None  # whose chunk is being sent
        self.num_sent = 0
        self.patient_until = time.monotonic() + _HANDSHAKE_S

    @property
    def is_owed(self) -> bool:
        return bool(self.head or self.reply or self.requests)

    @property
    def events(self) -> int:
        is_full = len(self.requests) == MOST_REPLIES_UNDER_WAY
        return (0 if is_full else selectors.EVENT_READ) | (
            selectors.EVENT_WRITE if self.is_owed else 0
        )


class Listener:
    """Answers whoever connects; at most so many at once.

    When there is one too many, the connection that has gone without a request for the longest is
    closed, those that have never made one first. So whoever only holds connections loses them to
    those who come, and a reader who lost its connection makes a new one. Clients that do not greet
    within 5 seconds, or take nothing of what they are owed for half a minute, are cut off.

    Args:
        answers: To the requests.
        host: Address to listen at.
        port: Port to listen at, 0 for any that is free.
        most: Connections that are held at once, at least 1.

    Attributes:
        port: Where it listens.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, answers: Answers, host: str, port: int, most: int) -> None:
        self._answers = answers
        self._most = most
        self._clients: dict[socket.socket, _Client] = {}
        self._count = itertools.count(1)
        self._next_look = 0.0
        self._is_stopped = False
        self._socket = _listen(host, port)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._alarmed, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._clients)

    def serve(self) -> None:
        """Answer until :meth:`stop` is called."""
        while not self._is_stopped:
            for key, events in self._selector.select(_LOOK_S if self._clients else None):
                client = self._clients.get(key.fileobj)  # type: ignore[call-overload]
                if client is not None:
                    self._attend(client, events)
                elif key.fileobj is self._socket:
                    self._accept()
            if time.monotonic() >= self._next_look:
                self._look()

    def _accept(self) -> None:
        try:
            connection, address = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if self._clients:
                    self._cut(self._idlest())
                else:
                    time.sleep(_NAP_S)  # it would be called again at once
            return
        while len(self._clients) >= self._most:
            self._cut(self._idlest())
        with suppress(OSError):  # it may have gone already, as reading from it will tell
            _set_options(connection)
        client = _Client(connection, str(address[0]), next(self._count))
        self._clients[connection] = client
        self._selector.register(connection, client.events)

    def _idlest(self) -> _Client:
        return min(self._clients.values(), key=lambda client: (client.has_asked, client.order))

    def _attend(self, client: _Client, events: int) -> None:
        """Read a little from a client, and send it a little."""
        before = client.events
        try:
            if events & selectors.EVENT_READ and client.inbox.room:
                self._receive(client)
            self._take_requests(client)
            for _ in range(_MOST_SENDS):
                if not client.is_owed:
                    break
                self._send(client)
                self._take_requests(client)
        except BlockingIOError:
            pass
        except OSError:
            self._cut(client)
            return
        if client.events != before:
            self._selector.modify(client.connection, client.events)

    def _receive(self, client: _Client) -> None:
        data = client.connection.recv(client.inbox.room)
        if not data:
            raise ConnectionAbortedError
        client.inbox.add(data)

    def _take_requests(self, client: _Client) -> None:
        answers = self._answers
        while len(client.requests) < MOST_REPLIES_UNDER_WAY:
            message = client.inbox.take()
            if message is None:
                return
            request = answers.read(message.first, message.num_frames, client.address, self.port)
            if request is not None:
                client.requests.append(request)
                client.order, client.has_asked = next(self._count), True
                client.patient_until = time.monotonic() + _SILENCE_S

    def _send(self, client: _Client) -> None:
        """Send some of what is owed.

        Raises:
            BlockingIOError: If there is no room for more.
            OSError: If the connection is broken, or a chunk is gone that was begun.
        """
        if not client.head and client.reply is None:
            self._begin(client)
        if client.head:
            client.head = client.head[client.connection.send(client.head) :]
        elif client.reply is not None:
            with self._answers.chunk(client.reply, client.name) as chunk:
                if chunk is None:
                    raise ConnectionAbortedError
                client.num_sent += client.connection.send(chunk[client.num_sent :])
            if client.num_sent == client.reply.length:
                self._answers.has_sent(client.reply, client.name)
                client.reply = None
        client.patient_until = time.monotonic() + _SILENCE_S

    def _begin(self, client: _Client) -> None:
        """With the answer to the next request."""
        reply = self._answers.reply(client.requests.popleft(), client.name)
        header = pack_reply(reply)
        has_chunk = reply.kind == DATA
        client.head = frame_head(len(header), has_more=has_chunk) + header
        if has_chunk:
            client.head += frame_head(reply.length, has_more=False)
            client.reply, client.num_sent = reply, 0

    def _look(self) -> None:
        """Cut off who has not greeted, or does not take what it is owed."""
        now = self._next_look = time.monotonic()
        self._next_look += _LOOK_S
        for client in list(self._clients.values()):
            is_waited_for = client.is_owed or not client.handshake.is_done
            if is_waited_for and now > client.patient_until:
                self._cut(client)

    def _cut(self, client: _Client) -> None:
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.connection.close()

    def stop(self) -> None:
        """Have :meth:`serve` return soon; for any thread."""
        self._is_stopped = True
        with suppress(OSError):
            self._alarm.send(b"!")

    def close(self) -> None:
        """Close all connections and free the port; a second call does nothing."""
        for client in list(self._clients.values()):
            self._cut(client)
        for each in (self._selector, self._socket, self._alarm, self._alarmed):
            each.close()


def _listen(host: str, port: int) -> socket.socket:
    is_ipv6 = ":" in host
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )


def _set_options(connection: socket.socket) -> None:
    """Send at once, and notice clients whose machine has gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S)
