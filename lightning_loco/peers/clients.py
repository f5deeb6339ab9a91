"""Who is connected to the serving socket; those who ask for nothing go when there are too many."""

from __future__ import annotations

import errno
import itertools

import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_loco.peers.held import Held

MOST_HELD_BYTES = 16 * 1024
"""Of a message that has not ended. Our own readers send messages of 48 bytes, 8 at a time."""
MOST_WAITING_BYTES = 2**18
"""Of messages that wait to be answered, of one client."""

_NO_LIMIT = 0
_ADDRESS = "inproc://clients"


class _Client:
    def __init__(self, held: Held, order: int) -> None:
        self.held = held
        self.order = order  # the later it came or the more lately it has asked, the larger
        self.has_asked = False


class Clients:
    """The connections to a socket: at most so many, and none that sends without end.

    When there is one too many, the connection that has gone without a request for the longest is
    closed, those that have never made one first. So whoever only holds connections loses them to
    those who come, and a reader who lost its connection makes a new one. It has no thread: whoever
    polls the socket polls :attr:`events`, too, calls :meth:`take_note` when there are any, and
    :meth:`look` now and then.

    Args:
        context: That of the socket.
        server: A ROUTER with keys that is not bound yet.
        most: Connections that are held at once, at least 1.

    Attributes:
        events: To be polled.
        closed: Connections that were closed, so far.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: zmq.Socket[bytes],
        most: int,
    ) -> None:
        self.closed = 0
        self._server = server
        self._most = most
        self._port: int | None = None
        self._clients: dict[int, _Client] = {}
        self._count = itertools.count()
        server.monitor(_ADDRESS, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events = context.socket(zmq.PAIR)
        self.events.linger = 0
        self.events.rcvhwm = _NO_LIMIT  # else ZeroMQ would wait for us, holding a lock
        self.events.connect(_ADDRESS)

    def __len__(self) -> int:
        return len(self._clients)

    def take_note(self) -> None:
        """Take note of who has come and gone."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())
            descriptor = int(event["value"])
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._welcome(descriptor)

    def _welcome(self, descriptor: int) -> None:
        while len(self._clients) >= self._most:
            self._cut(self._idlest())
        try:
            held = Held(descriptor)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._clients:
                self._cut(self._idlest())
            return
        if held.own_port != self._server_port():
            held.close()  # it has gone, and its number belongs to somebody else
            return
        self._clients[descriptor] = _Client(held, next(self._count))

    def _server_port(self) -> int:
        if self._port is None:
            self._port = bound_port(self._server)
        return self._port

    def _idlest(self) -> int:
        clients = self._clients
        return min(clients, key=lambda known: (clients[known].has_asked, clients[known].order))

    def take(self, frame: zmq.Frame) -> None:
        """A frame was taken from the socket; those that name a client do not count."""
        client = self._clients.get(_descriptor(frame))
        if client is not None:
            client.held.take(len(frame))

    def note_request(self, frame: zmq.Frame) -> None:
        """A frame was a request as it should be."""
        client = self._clients.get(_descriptor(frame))
        if client is not None:
            client.order, client.has_asked = next(self._count), True

    def cut(self, frame: zmq.Frame) -> None:
        """Close the connection over which a frame came."""
        descriptor = _descriptor(frame)
        if descriptor in self._clients:
            self._cut(descriptor)

    def look(self) -> None:
        """Close the connections that hold back too much, or send faster than is answered."""
        held_bytes = {
            descriptor: client.held.bytes
            for descriptor, client in self._clients.items()
            if client.held.exceeds(MOST_HELD_BYTES)
        }
        if not held_bytes:
            return
        # What was there when it was counted and is in no message that waits now, is in none at all.
        most = MOST_WAITING_BYTES if self._server.poll(0) else MOST_HELD_BYTES
        for suspect, count in held_bytes.items():
            if count > most:
                self._cut(suspect)

    def _cut(self, descriptor: int) -> None:
        self._clients.pop(descriptor).held.cut()
        self.closed += 1

    def _forget(self, descriptor: int) -> None:
        client = self._clients.pop(descriptor, None)
        if client is not None:
            client.held.close()

    def close(self) -> None:
        """Let go of everything, before the socket is closed."""
        self.events.close(0)
        for descriptor in list(self._clients):
            self._forget(descriptor)


def _descriptor(frame: zmq.Frame) -> int:
    """Over which connection a frame came; -1 for clients of the oldest protocols, which are cut."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def bound_port(socket: zmq.Socket[bytes]) -> int:
    """The port to which a socket is bound."""
    endpoint = socket.last_endpoint
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
