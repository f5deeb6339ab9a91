"""ZMTP 3.0, the protocol of ZeroMQ, as far as connections without keys need it.

ZeroMQ itself cannot be used for them: it bounds no memory that strangers could not fill. Its limit
counts messages, of which one may have frames without end, and libzmq 4.3.5 ends the whole process
when somebody who has filled the limit sends a ping and goes away.
"""

from __future__ import annotations

from typing import NamedTuple

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
LONGEST_HEAD = 9
MOST_FRAMES = 64
"""Of a message; those of our own protocol have two at most."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_READY = b"\x05READY"
_LONGEST_COMMAND = 512


class ProtocolBroken(ConnectionError):
    """What has come is not of this protocol, so that the connection is of no use."""


class Head(NamedTuple):
    """What stands before a frame.

    Attributes:
        size: Of the head itself.
        length: Of the frame.
        has_more: Whether the message has another frame after it.
        is_command: Whether it belongs to the protocol, and not to a message.
    """

    size: int
    length: int
    has_more: bool
    is_command: bool


def head_size(data: bytes | bytearray) -> int:
    """How long a head is that begins so; 2 while that cannot be told."""
    return LONGEST_HEAD if data and data[0] & _LONG else 2


def parse_head(data: bytes | bytearray) -> Head | None:
    """The head with which the data begin, or None if it has not come yet.

    Raises:
        ProtocolBroken: If there is no such head.

    Example:
        >>> parse_head(frame_head(48, has_more=True))
        Head(size=2, length=48, has_more=True, is_command=False)
    """
    size = head_size(data)
    if len(data) < size:
        return None
    flags = data[0]
    if flags > (_MORE | _LONG | _COMMAND):
        raise ProtocolBroken(f"a frame has the flags {flags}")
    length = int.from_bytes(data[1:size], "big")
    return Head(size, length, bool(flags & _MORE), bool(flags & _COMMAND))


def frame_head(length: int, *, has_more: bool) -> bytes:
    """The head of a frame of so many bytes."""
    flags = _MORE if has_more else 0
    if length < 256:
        return bytes([flags, length])
    return bytes([flags | _LONG]) + length.to_bytes(8, "big")


class Handshake:
    """The beginning of a connection: both sides greet, and say what they are.

    Args:
        kind: ``b"ROUTER"`` for the side that answers, ``b"DEALER"`` for the one that asks.

    Attributes:
        outgoing: What this side sends first, before it has received anything.
        is_done: Whether the other side has done the same.
    """

    def __init__(self, kind: bytes) -> None:
        body = _READY + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self.outgoing = GREETING + bytes([_COMMAND, len(body)]) + body
        self.is_done = False
        self._has_greeted = False

    def missing(self, data: bytearray) -> int:
        """Take the handshake off the beginning of what has come.

        Returns:
            How many bytes it needs at least to go on; 0 if it is done.

        Raises:
            ProtocolBroken: If the other side speaks another protocol.
        """
        if not self._has_greeted:
            if data[:1] not in (b"", GREETING[:1]):
                raise ProtocolBroken("it speaks another protocol")
            if len(data) < len(GREETING):
                return len(GREETING) - len(data)
            if not data[9] & 1 or data[10] < 3 or data[12:32] != GREETING[12:32]:
                raise ProtocolBroken("it speaks another version of the protocol, or needs keys")
            del data[: len(GREETING)]
            self._has_greeted = True
        head = parse_head(data)
        if head is None:
            return head_size(data) - len(data)
        if not head.is_command or head.length > _LONGEST_COMMAND:
            raise ProtocolBroken("it does not say that it is ready")
        end = head.size + head.length
        if len(data) < end:
            return end - len(data)
        if data[head.size : head.size + len(_READY)] != _READY:
            raise ProtocolBroken("it does not say that it is ready")
        del data[:end]
        self.is_done = True
        return 0


class Message(NamedTuple):
    """A message of short frames, of which only the first is kept."""

    first: bytes
    num_frames: int


class Inbox:
    """What has come over one connection, 4 KiB at most, and the messages therein.

    Args:
        handshake: Comes before the messages.
        longest_frame: Bytes, at most 4087.
    """

    BYTES = 4096

    def __init__(self, handshake: Handshake, longest_frame: int) -> None:
        assert longest_frame + LONGEST_HEAD <= self.BYTES
        self._handshake = handshake
        self._longest_frame = longest_frame
        self._data = bytearray()
        self._first = b""
        self._num_frames = 0

    @property
    def room(self) -> int:
        """How many bytes may be added."""
        return self.BYTES - len(self._data)

    def add(self, data: bytes) -> None:
        """Bytes have come, not more than there is :attr:`room` for."""
        self._data += data

    def take(self) -> Message | None:
        """The next message, if all of it is there.

        Raises:
            ProtocolBroken: If there are frames that are too long, or too many of them.
        """
        if not self._handshake.is_done and self._handshake.missing(self._data):
            return None
        while (head := parse_head(self._data)) is not None:
            if head.is_command or head.length > self._longest_frame:
                raise ProtocolBroken(f"a frame of {head.length} bytes, or of another kind")
            end = head.size + head.length
            if len(self._data) < end:
                return None
            if self._num_frames == 0:
                self._first = bytes(self._data[head.size : end])
            del self._data[:end]
            self._num_frames += 1
            if not head.has_more:
                message = Message(self._first, self._num_frames)
                self._first, self._num_frames = b"", 0
                return message
            if self._num_frames == MOST_FRAMES:
                raise ProtocolBroken("messages of too many frames")
        return None
