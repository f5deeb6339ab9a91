"""The thread that serves this worker's parameters, chunk by chunk, to whoever asks."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

import zmq

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.clients import Clients, bound_port
from lightning_loco.peers.keys import Doorkeeper, Keys
from lightning_loco.peers.protocol import (
    DATA,
    EMPTY,
    GONE,
    OTHER_MODEL,
    MalformedMessage,
    Model,
    Reply,
    Request,
    dtype_code,
    pack_reply,
    parse_request,
)
from lightning_loco.peers.publications import Publications

log = logging.getLogger(__name__)

MOST_REPLIES_UNDER_WAY = 16
"""Replies that wait for one client; more are dropped. Twice what our own readers ask for."""

_NO_LIMIT = 0
_LONGEST_FRAME_BYTES = 1024
_MOST_FRAMES = 64
_LOOK_MS = 50
_MOST_LOG_LINES = 20
_HANDSHAKE_MS = 5_000
_SILENCE_MS = 30_000
_KEEPALIVE_S = 10
_NO_TAG = Tag(0.0, 0.0)


class ServingThread(threading.Thread):
    """Answer requests for chunks of the publications until closed.

    Frames that come in have at most 1 KiB, only a few replies wait for each client, clients that do
    not read for half a minute are cut off, and nothing is kept for a client beyond its connection.
    Anything malformed is dropped, with one line in the log for each address and 20 in all. Clients
    that send more than can be answered, or messages that do not end, lose their connection, and so
    do idle ones when there are too many; see :class:`~lightning_loco.peers.clients.Clients`.

    ZeroMQ's own limit of requests that wait is off, and there are no heartbeats: libzmq 4.3.5 ends
    the whole process when a client that has filled such a limit sends a ping and goes away.

    Args:
        model: What is served; requests for another model are refused.
        publications: Where the parameters are.
        host: Address to listen at; ``"0.0.0.0"`` for all networks of this machine.
        port: Port to listen at; None or 0 for any that is free.
        keys: Only clients with these keys are answered; None answers everybody.
        max_clients: Connections that are held at once, at least 1.

    Attributes:
        port: Where it listens.
        bytes_sent: Bytes of parameters handed out.
        malformed: Messages dropped.

    Raises:
        RuntimeError: If the port is taken or the host is not an address of this machine.
    """

    def __init__(
        self,
        model: Model,
        publications: Publications,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        keys: Keys | None = None,
        max_clients: int = 64,
    ) -> None:
        super().__init__(name="loco-peer-serving", daemon=True)
        self.bytes_sent = 0
        self.malformed = 0
        self._model = model
        self._code = dtype_code(model.wire_dtype)
        self._publications = publications
        self._warned: set[str] = set()
        self._zmq = zmq.Context()
        self._doorkeeper = Doorkeeper(self._zmq, keys) if keys is not None else None
        self._socket = self._make_socket(keys)
        self._clients = Clients(self._zmq, self._socket, max_clients, is_encrypted=keys is not None)
        try:
            self.port = self._bind(host, port or 0)
        except BaseException:
            self._close_sockets()
            self._zmq.term()
            raise

    def _make_socket(self, keys: Keys | None) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(zmq.ROUTER)
        socket.linger = 0
        socket.rcvhwm = _NO_LIMIT
        socket.sndhwm = MOST_REPLIES_UNDER_WAY
        socket.maxmsgsize = _LONGEST_FRAME_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.tcp_maxrt = _SILENCE_MS
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _KEEPALIVE_S
        if keys is not None:
            keys.guard(socket)
        return socket

    def _bind(self, host: str, port: int) -> int:
        address = f"[{host}]" if ":" in host else host
        self._socket.ipv6 = ":" in host
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise RuntimeError(
                    f"Port {port} of {host} is taken, so parameters cannot be served there. End "
                    "the process that listens on it, choose another port for this worker, or "
                    "leave the port out to get a free one."
                ) from None
            raise RuntimeError(
                f"Cannot listen on port {port} of {host!r}: {error}. Use host='0.0.0.0' for all "
                "networks of this machine, or one of its own addresses."
            ) from None
        return bound_port(self._socket)

    def run(self) -> None:
        """Answer until the context is terminated."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._clients.events, zmq.POLLIN)
        if self._doorkeeper is not None:
            poller.register(self._doorkeeper.socket, zmq.POLLIN)
        next_look = 0.0
        try:
            while True:
                # One request per poll, in which ZeroMQ takes note of what the clients have read:
                # otherwise replies would find no room and be dropped.
                for socket, _ in poller.poll(_LOOK_MS if self._clients else None):
                    if socket is self._socket:
                        self._answer()
                    elif socket is self._clients.events:
                        self._clients.take_note()
                    elif self._doorkeeper is not None:
                        self._doorkeeper.answer()
                if time.monotonic() >= next_look:
                    self._clients.look()
                    next_look = time.monotonic() + _LOOK_MS / 1000
        except zmq.ContextTerminated:
            pass
        except Exception:
            log.exception("Parameters are no longer served to peers.")
        finally:
            self._close_sockets()

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
        if num_frames > _MOST_FRAMES:
            self._clients.cut(frame)
        try:
            if frame.more:
                raise MalformedMessage("it has more than one frame")
            request = parse_request(frame.bytes)
            beyond = request.offset + request.length > self._model.total_bytes
            if beyond and self._is_ours(request):
                raise MalformedMessage("it asks for bytes beyond the end of the model")
        except MalformedMessage as error:
            self._drop(frame, error)
            return
        self._clients.note_request(frame)
        if not self._is_ours(request):
            self._send(client, OTHER_MODEL, request)
        elif self._publications.latest == 0:
            self._send(client, EMPTY, request)
        else:
            self._send_chunk(client, request)

    def _is_ours(self, request: Request) -> bool:
        return request.checksum == self._model.checksum and request.dtype_code == self._code

    def _send_chunk(self, client: bytes, request: Request) -> None:
        end = request.offset + request.length
        with self._publications.reading(request.publication, client) as publication:
            if publication is None:
                self._send(client, GONE, request)
                return
            reply = self._reply(DATA, request)._replace(
                publication=publication.number, length=request.length, tag=publication.tag
            )
            data = publication.data[request.offset : end]
            with suppress(zmq.Again):
                self._socket.send(client, zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(pack_reply(reply), zmq.SNDMORE | zmq.NOBLOCK)
                self.bytes_sent += request.length
                self._socket.send(data, zmq.NOBLOCK)
            if end == self._model.total_bytes:
                self._publications.release(publication, client)

    def _send(self, client: bytes, kind: int, request: Request) -> None:
        with suppress(zmq.Again):
            header = pack_reply(self._reply(kind, request))
            self._socket.send_multipart([client, header], zmq.NOBLOCK)

    def _reply(self, kind: int, request: Request) -> Reply:
        return Reply(
            kind=kind,
            checksum=self._model.checksum,
            dtype_code=self._code,
            request_id=request.request_id,
            publication=request.publication,
            offset=request.offset,
            length=0,
            total_bytes=self._model.total_bytes,
            tag=_NO_TAG,
        )

    def _drop(self, frame: zmq.Frame, error: MalformedMessage) -> None:
        self.malformed += 1
        address = "an unknown address"
        with suppress(zmq.ZMQError):
            address = str(frame.get("Peer-Address"))
        if address in self._warned or len(self._warned) >= _MOST_LOG_LINES:
            return
        self._warned.add(address)
        log.warning(
            "Dropped a message from %s on port %d: %s. Further ones from there are dropped "
            "without a line here.",
            address,
            self.port,
            error,
        )

    def _close_sockets(self) -> None:
        self._clients.close()
        self._socket.close(0)
        if self._doorkeeper is not None:
            self._doorkeeper.socket.close(0)

    def close(self) -> None:
        """End the thread and free the port; a second call does nothing."""
        if self.ident is None:
            self._close_sockets()
        self._zmq.term()
        if self.is_alive():
            self.join()
