"""A plain connection to a peer, for jobs without keys.

Chunks are received where they belong, and only those that were asked for; all else is read into a
small buffer and forgotten. So whatever the peer sends, nothing grows.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

from lightning_loco.peers.directory import Peer
from lightning_loco.peers.link import LinkBroken
from lightning_loco.peers.protocol import (
    DATA,
    MAX_CHUNK_BYTES,
    MalformedMessage,
    Reply,
)
from lightning_loco.peers.transfer import Transfer
from lightning_loco.peers.zmtp import (
    MOST_FRAMES,
    Handshake,
    Head,
    ProtocolBroken,
    frame_head,
    head_size,
    parse_head,
)

_LONGEST_HEADER_BYTES = 1024
_SKIP_BYTES = 2**16
_NOT_YET = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


class TcpLink:
    """A :class:`~lightning_loco.peers.link.Link` without keys.

    Args:
        peer: Where to connect to.
        chunk_bytes: The longest chunk that is asked for.

    Attributes:
        peer: Whom it leads to.
    """

    def __init__(self, peer: Peer, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self.peer = peer
        self._longest_frame = chunk_bytes + _LONGEST_HEADER_BYTES
        self._loss: str | None = None
        self._handshake = Handshake(b"DEALER")
        self._unsent = self._handshake.outgoing
        self._requests = b""  # to be sent after the handshake
        # What has come of the message that has begun: of its first frame, or of a later one's head;
        # what its first frame has said, and where the rest of its chunk goes.
        self._data = bytearray()
        self._header: Reply | None = None
        self._room: memoryview | None = None
        # A message that is not wanted: the frames before this one, what is left of this one, and
        # whether there are more.
        self._num_frames = 0
        self._num_to_skip = 0
        self._has_more = False
        self._skipped = bytearray(_SKIP_BYTES)
        family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connect()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _connect(self) -> None:
        try:
            code = self._socket.connect_ex((self.peer.host, self.peer.port))
        except OSError as error:  # nobody knows the name
            self._lose(error)
        else:
            if code not in _NOT_YET:
                self._lose(OSError(code, os.strerror(code)))

    def _lose(self, error: OSError) -> LinkBroken:
        self._loss = error.strerror or str(error)
        return self._broken()

    def _broken(self) -> LinkBroken:
        return LinkBroken(f"{self._loss} at {self.peer.address}")

    def check(self) -> None:
        """See whether the connection still stands, without waiting, while nothing is asked for.

        Raises:
            LinkBroken: If it does not, or the peer sends what nobody has asked for.
        """
        has_come = self._look(0)
        has_begun = self._data or self._header or self._num_to_skip or self._has_more
        if self._handshake.is_done and (has_come or has_begun):
            raise LinkBroken(f"{self.peer.address} sends what nobody has asked for")

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or after a while.

        Raises:
            LinkBroken: If the link broke, and nothing has come.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._look(left_s):
                return

    def _look(self, timeout_s: float) -> bool:
        """Wait until there is something to read, or there is room for what is to be sent."""
        if self._loss is not None:
            raise self._broken()
        try:
            for _, events in self._selector.select(timeout_s):
                if events & selectors.EVENT_WRITE:
                    self._flush()
                if events & selectors.EVENT_READ:
                    return self._is_open()
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lose(error) from None
        return False

    def _is_open(self) -> bool:
        if self._socket.recv(1, socket.MSG_PEEK):
            return True
        raise ConnectionResetError("connection closed")

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            LinkBroken: If there is no connection that would take it.
        """
        self._requests += frame_head(len(request), has_more=False) + request
        try:
            if self._loss is None and self._handshake.is_done:
                self._flush()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(error)
        if self._loss is not None:
            raise LinkBroken(f"no connection to {self.peer.address}: {self._loss}")

    def _flush(self) -> None:
        """Send what there is room for; nothing while the connection is still being made."""
        if self._handshake.is_done:
            self._unsent, self._requests = self._unsent + self._requests, b""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        finally:
            events = selectors.EVENT_WRITE if self._unsent else 0
            self._selector.modify(self._socket, selectors.EVENT_READ | events)

    def receive(self, transfer: Transfer) -> Reply | None:
        """Take one reply, and receive its chunk in its place.

        Args:
            transfer: Says which replies are expected; is not told of the reply.

        Returns:
            The reply, or None if not all of it has come.

        Raises:
            MalformedMessage: If what has come is none, or not expected; it is dropped.
            LinkBroken: If the connection broke, or what comes is not of the protocol.
        """
        if self._loss is not None:
            raise self._broken()
        try:
            return self._receive(transfer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lose(error) from None

    def _receive(self, transfer: Transfer) -> Reply:
        if not self._handshake.is_done:
            while missing := self._handshake.missing(self._data):
                self._fill(len(self._data) + missing)
            self._flush()
        self._skip()
        if self._header is None:
            self._header = self._read_header(transfer)
        if self._header.kind == DATA:
            if self._room is None:
                self._room = self._begin_chunk(self._header, transfer)
            while self._room:
                self._room = self._room[self._receive_into(self._room) :]
        reply, self._header, self._room = self._header, None, None
        return reply

    def _fill(self, count: int) -> None:
        """Receive until there are so many bytes."""
        while len(self._data) < count:
            part = self._socket.recv(count - len(self._data))
            if not part:
                raise ConnectionResetError("connection closed")
            self._data += part

    def _receive_into(self, room: memoryview | bytearray, most: int = 0) -> int:
        count = self._socket.recv_into(room, most)
        if not count:
            raise ConnectionResetError("connection closed")
        return count

    def _read_head(self) -> Head:
        self._fill(2)
        self._fill(head_size(self._data))
        head = parse_head(self._data)
        assert head is not None
        if head.is_command or head.length > self._longest_frame:
            raise ProtocolBroken(f"a frame of {head.length} bytes, or of another kind")
        return head

    def _read_header(self, transfer: Transfer) -> Reply:
        """The first frame of a message."""
        head = self._read_head()
        if head.length > _LONGEST_HEADER_BYTES:
            self._begin_to_skip(head)
            raise MalformedMessage(f"its header has {head.length} bytes")
        self._fill(head.size + head.length)
        frame = bytes(self._data[head.size :])
        self._data.clear()
        try:
            return transfer.read(frame, head.has_more)
        except MalformedMessage:
            self._has_more = head.has_more
            raise

    def _begin_chunk(self, reply: Reply, transfer: Transfer) -> memoryview:
        """Where the second frame of a message belongs."""
        head = self._read_head()
        if head.length != reply.length or head.has_more:
            self._header = None
            self._begin_to_skip(head)
            more = " and more" if head.has_more else ""
            raise MalformedMessage(f"{head.length} bytes{more} instead of {reply.length}")
        self._data.clear()
        return transfer.room(reply)

    def _begin_to_skip(self, head: Head) -> None:
        self._data.clear()
        self._num_to_skip, self._has_more = head.length, head.has_more

    def _skip(self) -> None:
        """Forget what is left of a message that is not wanted."""
        while self._num_to_skip or self._has_more:
            if self._num_to_skip:
                most = min(self._num_to_skip, _SKIP_BYTES)
                self._num_to_skip -= self._receive_into(self._skipped, most)
                continue
            self._begin_to_skip(self._read_head())
            self._num_frames += 1
            if self._num_frames > MOST_FRAMES:
                raise ProtocolBroken("messages of too many frames")
        self._num_frames = 0

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._selector.close()
        self._socket.close()
