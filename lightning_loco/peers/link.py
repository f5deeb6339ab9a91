"""Connections to peers: a socket each, and the events that tell that it is broken."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_loco.peers.directory import Directory, Peer
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.protocol import (
    DATA,
    MAX_CHUNK_BYTES,
    MalformedMessage,
    Reply,
    parse_reply,
)
from lightning_loco.peers.transfer import Transfer

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FRAMING_BYTES = 1024
_MOST_REPLIES_WAITING = 32
_NEVER = -1


class LinkBroken(ConnectionError):
    """The peer refused the connection, or closed it."""


class Link:
    """A connection that is made once: when it breaks, a new link is needed.

    Args:
        context: Of the thread that uses the link.
        peer: Where to connect to.
        keys: The job's keys, if it has any.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], peer: Peer, keys: Keys | None
    ) -> None:
        self.peer = peer
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvhwm = _MOST_REPLIES_WAITING
        self._socket.maxmsgsize = MAX_CHUNK_BYTES + _FRAMING_BYTES
        self._socket.reconnect_ivl = _NEVER
        self._socket.ipv6 = ":" in peer.host
        if keys is not None:
            keys.present(self._socket)
        self._monitor = self._socket.get_monitor_socket(_BROKEN)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(peer.address)

    def check(self) -> None:
        """See whether the connection still stands, without waiting.

        Raises:
            LinkBroken: If it does not.
        """
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _BROKEN:
                raise LinkBroken(f"{zmq.Event(event).name} at {self.peer.address}")

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or after a while.

        Raises:
            LinkBroken: If the link broke, and nothing has come.
        """
        ready = dict(self._poller.poll(max(1, int(1000 * timeout_s))))
        if self._monitor in ready and self._socket not in ready:
            self.check()

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            LinkBroken: If there is no connection that would take it.
        """
        try:
            self._socket.send(request, zmq.NOBLOCK)
        except zmq.Again:
            raise LinkBroken(f"no connection to {self.peer.address}") from None

    def receive(self, transfer: Transfer) -> Reply | None:
        """Take one reply, and put its chunk into its place.

        Args:
            transfer: Says which replies are expected; is not told of the reply.

        Returns:
            The reply, or None if none has come.

        Raises:
            MalformedMessage: If what has come is none, or not expected; it is dropped.
        """
        try:
            header = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        has_more = self._has_more()
        try:
            reply = parse_reply(header)
            if not transfer.expects(reply):
                raise MalformedMessage("it answers none of the requests under way")
            if has_more != (reply.kind == DATA):
                raise MalformedMessage("it has another number of frames than it says")
            if has_more:
                chunk = self._socket.recv(copy=False)
                has_more = chunk.more
                if len(chunk) != reply.length or has_more:
                    raise MalformedMessage(f"{len(chunk)} bytes instead of {reply.length}")
                transfer.place(reply, chunk.buffer)
        finally:
            while has_more:
                self._socket.recv_into(bytearray())
                has_more = self._has_more()
        return reply

    def _has_more(self) -> bool:
        return bool(self._socket.get(zmq.RCVMORE))

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)


class Links:
    """At most one link to each peer, made when it is first wanted; for one thread.

    Args:
        directory: Where the peers are.
        keys: The job's keys, if it has any.
    """

    def __init__(self, directory: Directory, keys: Keys | None) -> None:
        self._directory = directory
        self._keys = keys
        self._zmq = zmq.Context()
        self._links: dict[str, Link] = {}

    def get(self, name: str) -> tuple[Link | None, bool]:
        """The connection to a peer: the one from before if it still stands, else a new one.

        Returns:
            The link, or None while nobody knows where the peer is; and whether it is a new one.
        """
        link = self._links.get(name)
        if link is not None:
            try:
                link.check()
                return link, False
            except LinkBroken:
                self.drop(name)
        peer = self._directory.find(name)
        if peer is None:
            return None, True
        link = self._links[name] = Link(self._zmq, peer, self._keys)
        return link, True

    def drop(self, name: str) -> None:
        """Close the connection to a peer, and look anew where it is the next time."""
        link = self._links.pop(name, None)
        if link is not None:
            link.close()
        self._directory.forget(name)

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._zmq.term()
