"""An encrypted connection to a peer, for jobs with keys: a socket of ZeroMQ, and its events."""

from __future__ import annotations

import time
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_loco.peers.directory import Peer
from lightning_loco.peers.held import Held
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.link import LinkBroken
from lightning_loco.peers.protocol import MAX_CHUNK_BYTES, MalformedMessage, Reply
from lightning_loco.peers.transfer import WINDOW, Transfer
from lightning_loco.peers.zmtp import MOST_FRAMES

_LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FRAMING_BYTES = 1024
_STRAY_BYTES = 64 * 1024
_NO_LIMIT = 0
_NEVER_MS = 2**30


class CurveLink:
    """A :class:`~lightning_loco.peers.link.Link` with keys.

    ZeroMQ's own limit of replies that wait is off: libzmq 4.3.5 ends the whole process when a peer
    that has filled it sends a ping and goes away. So it does when a peer goes away in the middle of
    a reply that is being read, if it is told never to connect again: hence a time beyond all links.

    Args:
        context: Of the thread that uses the link.
        peer: Where to connect to.
        keys: The job's keys.
        chunk_bytes: The longest chunk that is asked for.

    Attributes:
        peer: Whom it leads to.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Peer,
        keys: Keys,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self.peer = peer
        self._held: Held | None = None
        self._loss: str | None = None
        # A reply that has not ended, and one that ZeroMQ is about to hand over; and all replies to
        # what can be under way.
        self._most_held = 2 * (chunk_bytes + _FRAMING_BYTES) + _STRAY_BYTES
        self._most_waiting = (WINDOW + 2) * (chunk_bytes + _FRAMING_BYTES) + _STRAY_BYTES
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvhwm = _NO_LIMIT
        self._socket.maxmsgsize = chunk_bytes + _FRAMING_BYTES
        self._socket.reconnect_ivl = _NEVER_MS
        self._socket.ipv6 = ":" in peer.host
        keys.present(self._socket)
        self._monitor = self._socket.get_monitor_socket(_LOST | zmq.EVENT_CONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(peer.address)

    def check(self) -> None:
        """See whether the connection still stands, without waiting, while nothing is asked for.

        Raises:
            LinkBroken: If it does not, or the peer sends what nobody has asked for.
        """
        self._read_events()
        self._raise_if_lost()
        if self._held is not None and self._held.exceeds(_STRAY_BYTES):
            raise LinkBroken(f"{self.peer.address} sends what nobody has asked for")

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] & _LOST:
                self._loss = zmq.Event(event["event"]).name
            else:
                with suppress(OSError):  # it has gone already, as the next event says
                    self._held = Held(int(event["value"]))

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise LinkBroken(f"{self._loss} at {self.peer.address}")

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or after a while.

        Raises:
            LinkBroken: If the link broke, and nothing has come, or a message that does not end.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(1, int(1000 * left_s))))
            if self._socket in ready:
                return
            self._read_events()
            self._raise_if_lost()
            # What was there when it was counted and is in no message by now, is in none at all.
            too_much = self._held is not None and self._held.exceeds(self._most_held)
            if too_much and not self._socket.poll(0):
                raise LinkBroken(f"{self.peer.address} sends a message without end")
            if self._monitor not in ready or left_s <= 0:
                return

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            LinkBroken: If there is no connection that would take it.
        """
        if self._loss is None:
            with suppress(zmq.Again):
                self._socket.send(request, zmq.NOBLOCK)
                return
        raise LinkBroken(f"no connection to {self.peer.address}")

    def receive(self, transfer: Transfer) -> Reply | None:
        """Take one reply, and put its chunk into its place.

        Args:
            transfer: Says which replies are expected; is not told of the reply.

        Returns:
            The reply, or None if none has come.

        Raises:
            MalformedMessage: If what has come is none, or not expected; it is dropped.
            LinkBroken: If it has far more frames than a reply, or more waits than was asked for.
        """
        if self._held is not None and self._held.exceeds(self._most_waiting):
            raise LinkBroken(f"{self.peer.address} sends more than was asked for")
        try:
            header = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._take(len(header))
        has_more = self._has_more()
        try:
            reply = transfer.read(header, has_more)
            if has_more:
                chunk = self._socket.recv(copy=False)
                self._take(len(chunk))
                has_more = chunk.more
                if len(chunk) != reply.length or has_more:
                    raise MalformedMessage(f"{len(chunk)} bytes instead of {reply.length}")
                transfer.place(reply, chunk.buffer)
        finally:
            if has_more:
                self._skip_frames()
        return reply

    def _skip_frames(self) -> None:
        for _ in range(MOST_FRAMES):
            frame = self._socket.recv(copy=False)
            self._take(len(frame))
            if not frame.more:
                return
        raise LinkBroken(f"{self.peer.address} sends messages of too many frames")

    def _take(self, length: int) -> None:
        if self._held is None:
            self._read_events()
        if self._held is not None:
            self._held.take(length)

    def _has_more(self) -> bool:
        return bool(self._socket.get(zmq.RCVMORE))

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if self._held is not None:
            self._held.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
