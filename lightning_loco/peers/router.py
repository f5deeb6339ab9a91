"""Serves clients that hold the job's keys, over encrypted connections of ZeroMQ."""

from __future__ import annotations

import time
from contextlib import suppress

import zmq

from lightning_loco.peers.answers import LONGEST_REQUEST_BYTES, MOST_REPLIES_UNDER_WAY, Answers
from lightning_loco.peers.clients import Clients, bound_port
from lightning_loco.peers.keys import Doorkeeper, Keys
from lightning_loco.peers.protocol import DATA, GONE, Reply, pack_reply
from lightning_loco.peers.zmtp import MOST_FRAMES

_NO_LIMIT = 0
_LOOK_MS = 50
_HANDSHAKE_MS = 5_000
_SILENCE_MS = 30_000
_KEEPALIVE_S = 10


class Router:
    """Answers whoever has the keys; at most so many at once.

    Clients that do not read for half a minute are cut off, and nothing is kept for a client beyond
    its connection. Those that send more than can be answered, or messages that do not end, lose
    their connection, and so do idle ones when there are too many; see
    :class:`~lightning_loco.peers.clients.Clients`.

    ZeroMQ's own limit of requests that wait is off, and there are no heartbeats: libzmq 4.3.5 ends
    the whole process when a client that has filled such a limit sends a ping and goes away.

    Args:
        answers: To the requests.
        host: Address to listen at.
        port: Port to listen at, 0 for any that is free.
        most: Connections that are held at once, at least 1.
        keys: That clients must hold.

    Attributes:
        port: Where it listens.

    Raises:
        zmq.ZMQError: If it cannot listen there.
    """

    def __init__(self, answers: Answers, host: str, port: int, most: int, keys: Keys) -> None:
        self._answers = answers
        self._zmq = zmq.Context()
        self._doorkeeper = Doorkeeper(self._zmq, keys)
        self._socket = self._make_socket(keys)
        self._clients = Clients(self._zmq, self._socket, most)
        try:
            self._socket.ipv6 = ":" in host
            address = f"[{host}]" if ":" in host else host
            self._socket.bind(f"tcp://{address}:{port or '*'}")
            self.port = bound_port(self._socket)
        except BaseException:
            self.close()
            self.stop()
            raise

    def _make_socket(self, keys: Keys) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(zmq.ROUTER)
        socket.linger = 0
        socket.rcvhwm = _NO_LIMIT
        socket.sndhwm = MOST_REPLIES_UNDER_WAY
        socket.maxmsgsize = LONGEST_REQUEST_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.tcp_maxrt = _SILENCE_MS
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _KEEPALIVE_S
        keys.guard(socket)
        return socket

    def serve(self) -> None:
        """Answer until :meth:`stop` is called."""
        with suppress(zmq.ContextTerminated):
            self._serve()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._clients.events, self._doorkeeper.socket):
            poller.register(each, zmq.POLLIN)
        next_look = 0.0
        while True:
            # One request per poll, in which ZeroMQ takes note of what the clients have read:
            # otherwise replies would find no room and be dropped.
            for socket, _ in poller.poll(_LOOK_MS if self._clients else None):
                if socket is self._socket:
                    self._answer()
                elif socket is self._clients.events:
                    self._clients.take_note()
                else:
                    self._doorkeeper.answer()
            if time.monotonic() >= next_look:
                self._clients.look()
                next_look = time.monotonic() + _LOOK_MS / 1000

    def _answer(self) -> None:
        """Take one message and answer it, or drop it."""
        client = self._socket.recv()
        frame = last = self._socket.recv(copy=False)
        self._clients.take(frame)
        num_frames = 1
        while last.more:
            last = self._socket.recv(copy=False)
            self._clients.take(last)
            num_frames += 1
        if num_frames > MOST_FRAMES:
            self._clients.cut(frame)
        request = self._answers.read(frame.bytes, num_frames, _address(frame), self.port)
        if request is None:
            return
        self._clients.note_request(frame)
        reply = self._answers.reply(request, client)
        if reply.kind == DATA:
            self._send_chunk(client, reply)
        else:
            self._send(client, reply)

    def _send_chunk(self, client: bytes, reply: Reply) -> None:
        with self._answers.chunk(reply, client) as chunk:
            if chunk is None:
                self._send(client, reply._replace(kind=GONE, length=0))
                return
            with suppress(zmq.Again):
                self._socket.send(client, zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(pack_reply(reply), zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(chunk, zmq.NOBLOCK)
        self._answers.has_sent(reply, client)

    def _send(self, client: bytes, reply: Reply) -> None:
        with suppress(zmq.Again):
            self._socket.send_multipart([client, pack_reply(reply)], zmq.NOBLOCK)

    def stop(self) -> None:
        """Have :meth:`serve` return; for any thread. Waits until everything is closed."""
        self._zmq.term()

    def close(self) -> None:
        """Close all connections and free the port; a second call does nothing."""
        self._clients.close()
        self._socket.close(0)
        self._doorkeeper.socket.close(0)


def _address(frame: zmq.Frame) -> str:
    with suppress(zmq.ZMQError):
        return str(frame.get("Peer-Address"))
    return "an unknown address"
