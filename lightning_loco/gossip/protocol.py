"""The protocol between peers: how a model is encoded, and the headers of requests and replies.

A request has a header and no body. The body of a reply holds the parameters, if there are any. All
numbers are little endian. Nothing that is received is unpickled or evaluated, and every length is
compared with the length that this worker's own model requires before anything else is done.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.plain import plain
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import Codec, as_compression
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.transport import MalformedMessage

# ------------------------------------------------------------------- how a model is encoded

SINGLE_THREAD_ELEMENTS = 32_640
"""Values of one PyTorch operation that runs in the calling thread alone.

From 32,768 values on PyTorch uses its thread pool, which would slow down training. This is less,
and a multiple of the cache line.
"""


class ModelId(NamedTuple):
    """Identifies a model and its encoding; equal on two workers that read from each other.

    Attributes:
        schema_checksum: Checksum of the names, shapes and dtypes of all parameters, 64 bits.
        encoding_checksum: Checksum of the codec with its settings or, without one, of the dtype.
    """

    schema_checksum: int
    encoding_checksum: int


class WireFormat(NamedTuple):
    """How the parameters of a model are encoded in the body of a reply.

    The body consists of *rows*. Each row encodes one *block* of consecutive values. Without a codec
    every value is a row.

    Attributes:
        schema_checksum: Checksum of the names, shapes and dtypes of all parameters, 64 bits.
        numel: Number of parameters P.
        dtype: Dtype of the flat vector ``(P,)``, float32 or float64.
        codec: Encodes the values. None sends them as they are.

    Example:
        >>> from lightning_loco.compression import Int8
        >>> format = WireFormat(7, 10, torch.float32, Int8(block=8))
        >>> format.row_bytes, format.total_bytes, format.elements(offset=12, length=12)
        (12, 24, slice(8, 10, None))
        >>> wire = format.codec.encode(torch.arange(10.0))
        >>> format.decode(wire, 8, torch.empty(2))
        tensor([8., 9.])
    """

    schema_checksum: int
    numel: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def model_id(self) -> ModelId:
        """Identifies the model and its encoding."""
        # Also the settings of a codec, such as its block, change the bytes of a value.
        encoding = str(self.dtype) if self.codec is None else plain(self.codec)
        return ModelId(self.schema_checksum, schema_checksum(encoding))

    @property
    def block(self) -> int:
        """Number of values in a row."""
        return 1 if self.codec is None else self.codec.block

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize if self.codec is None else self.codec.row_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the encoded parameters in bytes: a whole number of rows."""
        return -(-self.numel // self.block) * self.row_bytes

    def elements(self, offset: int, length: int) -> slice:
        """Return the values in whole rows, which begin at ``offset`` and have ``length`` bytes."""
        start = offset // self.row_bytes * self.block
        stop = start + length // self.row_bytes * self.block
        return slice(start, min(stop, self.numel))

    def decode(self, wire: Tensor, start: int, out: Tensor) -> Tensor:
        """Decode ``out.numel()`` values in the calling thread alone.

        ``wire`` are all encoded parameters, uint8; a codec decodes any bytes. ``start`` is the
        index of the first value, which must be the first one of a block. Returns ``out``, flat
        memory that only a codec needs, or without a codec a view of ``wire``.
        """
        if self.codec is None:
            return wire.view(self.dtype)[start : start + out.numel()]
        first = start // self.block * self.row_bytes
        last = first + self.codec.num_bytes(out.numel())
        # In steps of few elements, since this runs beside training.
        return self.codec.decode(wire[first:last], out, SINGLE_THREAD_ELEMENTS)


def pull_codec(compression: Any) -> Codec | None:
    """Return the codec with which peers encode their parameters; None if they send them as is.

    TypeError for a wrong type; ValueError if the name is unknown, the codec is too rough, or it
    uses error feedback.
    """
    found = as_compression(compression, "pull", sends_parameters=True)
    return None if found is None else found.codec


# ---------------------------------------------------------------------- requests and replies

PARAMETERS = b"DATA"
NOTHING_PUBLISHED = b"NONE"
OTHER_MODEL = b"DIFF"

_READ = b"READ"
_REQUEST = struct.Struct("<4sQQ")
_REPLY = struct.Struct("<4sQQdd")


class ReplyHeader(NamedTuple):
    """The header of a reply.

    Attributes:
        kind: ``PARAMETERS`` (the body holds them), ``NOTHING_PUBLISHED`` or ``OTHER_MODEL``.
        model_id: Identifies the model and encoding of the worker that replies.
        tag: Clock and loss of the parameters.
    """

    kind: bytes
    model_id: ModelId
    tag: Tag = Tag(0.0, 0.0)


def pack_request(model_id: ModelId) -> bytes:
    """Return the header of a request for the parameters of a model."""
    return _REQUEST.pack(_READ, *model_id)


def parse_request(header: bytes) -> ModelId:
    """Parse the header of a request; MalformedMessage if it is not of :func:`pack_request`."""
    if len(header) != _REQUEST.size or header[: len(_READ)] != _READ:
        raise MalformedMessage("it is not a request for parameters")
    _, *checksums = _REQUEST.unpack(header)
    return ModelId(*checksums)


def pack_reply(reply: ReplyHeader) -> bytes:
    """Return the header of a reply."""
    return _REPLY.pack(reply.kind, *reply.model_id, *reply.tag)


def parse_reply(header: bytes) -> ReplyHeader:
    """Parse the header of a reply; MalformedMessage if it is not of :func:`pack_reply`."""
    if len(header) != _REPLY.size:
        raise MalformedMessage(f"the header of a reply has {_REPLY.size} bytes, not {len(header)}")
    kind, schema, encoding, clock, loss = _REPLY.unpack(header)
    if kind not in (PARAMETERS, NOTHING_PUBLISHED, OTHER_MODEL):
        raise MalformedMessage(f"unknown kind of reply: {kind!r}")
    return ReplyHeader(kind, ModelId(schema, encoding), Tag(clock, loss))
