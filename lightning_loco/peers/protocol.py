"""The messages between peers: fixed-size binary headers, and one frame of raw numbers.

All is little endian. Nothing that comes from the network is unpickled or evaluated, and every
length is compared with what this side knows of its own model before anything is done with it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from lightning_loco.algorithms.pairwise import Tag

MAX_CHUNK_BYTES = 4 * 2**20
"""The longest chunk of a model in one reply."""

LATEST = 0
"""As the number of a publication: whichever is the latest."""

# Kinds of messages.
REQUEST = 1
DATA = 2
EMPTY = 3
GONE = 4
OTHER_MODEL = 5
_REPLIES = (DATA, EMPTY, GONE, OTHER_MODEL)

_MAGIC = b"LOCO"
_VERSION = 1
# magic, version, kind, zero | checksum, wire format, request id, publication, offset, length
_COMMON = "<4sBBHQQQQQI"
_REQUEST = struct.Struct(_COMMON)
# ... | total bytes, clock, loss
_REPLY = struct.Struct(_COMMON + "Qdd")

MAX_REQUEST_BYTES = _REQUEST.size


class MalformedMessage(ValueError):
    """A message that does not follow the protocol."""


class Request(NamedTuple):
    """Ask for the bytes ``offset : offset + length`` of a publication (0: the latest)."""

    checksum: int
    wire_format: int
    request_id: int
    publication: int
    offset: int
    length: int


class Reply(NamedTuple):
    """Answer to one request; ``DATA`` is followed by a frame of ``length`` bytes."""

    kind: int
    checksum: int
    wire_format: int
    request_id: int
    publication: int
    offset: int
    length: int
    total_bytes: int
    tag: Tag


def pack_request(request: Request) -> bytes:
    """Write a request."""
    return _REQUEST.pack(_MAGIC, _VERSION, REQUEST, 0, *request)


def parse_request(frame: bytes) -> Request:
    """Read a request.

    Raises:
        MalformedMessage: For anything that :func:`pack_request` would not write.
    """
    if len(frame) != _REQUEST.size:
        raise MalformedMessage(f"a request has {_REQUEST.size} bytes, this has {len(frame)}")
    magic, version, kind, zero, *others = _REQUEST.unpack(frame)
    _check_start(magic, version, zero)
    if kind != REQUEST:
        raise MalformedMessage(f"kind {kind} is not a request")
    request = Request(*others)
    if not 1 <= request.length <= MAX_CHUNK_BYTES:
        raise MalformedMessage(f"{request.length} bytes asked for")
    return request


def pack_reply(reply: Reply) -> bytes:
    """Write the header of a reply."""
    kind, *others, tag = reply
    return _REPLY.pack(_MAGIC, _VERSION, kind, 0, *others, *tag)


def parse_reply(frame: bytes) -> Reply:
    """Read the header of a reply.

    Raises:
        MalformedMessage: For anything that :func:`pack_reply` would not write.
    """
    if len(frame) != _REPLY.size:
        raise MalformedMessage(f"a reply has {_REPLY.size} bytes, this has {len(frame)}")
    magic, version, kind, zero, *others, clock, loss = _REPLY.unpack(frame)
    _check_start(magic, version, zero)
    if kind not in _REPLIES:
        raise MalformedMessage(f"kind {kind} is not a reply")
    checksum, wire_format, number, publication, offset, length, total_bytes = others
    tag = Tag(clock, loss)
    reply = Reply(
        kind, checksum, wire_format, number, publication, offset, length, total_bytes, tag
    )
    if reply.length > MAX_CHUNK_BYTES:
        raise MalformedMessage(f"{reply.length} bytes announced")
    return reply


def _check_start(magic: bytes, version: int, zero: int) -> None:
    if magic != _MAGIC:
        raise MalformedMessage("it does not begin like a message of a peer")
    if version != _VERSION:
        raise MalformedMessage(f"version {version} of the protocol, this is version {_VERSION}")
    if zero != 0:
        raise MalformedMessage(f"filler {zero}")
