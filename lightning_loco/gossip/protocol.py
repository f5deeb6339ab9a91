"""What two workers say to each other when one reads the parameters of the other.

A request is a note without a body. A reply is a note, whose body are the parameters if there are
any. All is little endian. Nothing that comes from the network is unpickled or evaluated, and every
length is compared with what this side knows of its own model before anything is done with it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.transport import MalformedMessage

PARAMETERS = b"DATA"
NOTHING_YET = b"NONE"
OTHER_MODEL = b"DIFF"

_READ = b"READ"
_REQUEST = struct.Struct("<4sQQ")
_REPLY = struct.Struct("<4sQQdd")


class Content(NamedTuple):
    """What is read or served: equal on both sides, or nothing is read.

    Attributes:
        checksum: Of the model.
        wire_format: Of the dtype or the codec.
    """

    checksum: int
    wire_format: int


class Answer(NamedTuple):
    """The note of a reply.

    Attributes:
        kind: ``PARAMETERS``, which are the body; ``NOTHING_YET`` or ``OTHER_MODEL``.
        content: What is served here.
        tag: Of the parameters.
    """

    kind: bytes
    content: Content
    tag: Tag = Tag(0.0, 0.0)


def pack_request(content: Content) -> bytes:
    """Write the note of a request for parameters."""
    return _REQUEST.pack(_READ, *content)


def parse_request(note: bytes) -> Content:
    """Read the note of a request.

    Raises:
        MalformedMessage: For anything that :func:`pack_request` would not write.
    """
    if len(note) != _REQUEST.size or note[: len(_READ)] != _READ:
        raise MalformedMessage("it is no request for parameters")
    _, *content = _REQUEST.unpack(note)
    return Content(*content)


def pack_answer(answer: Answer) -> bytes:
    """Write the note of a reply."""
    return _REPLY.pack(answer.kind, *answer.content, *answer.tag)


def parse_answer(note: bytes) -> Answer:
    """Read the note of a reply.

    Raises:
        MalformedMessage: For anything that :func:`pack_answer` would not write.
    """
    if len(note) != _REPLY.size:
        raise MalformedMessage(f"an answer has {_REPLY.size} bytes, this has {len(note)}")
    kind, checksum, wire_format, clock, loss = _REPLY.unpack(note)
    if kind not in (PARAMETERS, NOTHING_YET, OTHER_MODEL):
        raise MalformedMessage(f"an answer of the kind {kind!r}")
    return Answer(kind, Content(checksum, wire_format), Tag(clock, loss))
