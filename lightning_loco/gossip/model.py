"""What travels between peers: the parameters of a model as they are, or as a codec writes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression import Codec, as_compression
from lightning_loco.gossip.protocol import Content
from lightning_loco.parameters.schema import schema_checksum
from lightning_loco.values import plain

# Below 32768, the size from which PyTorch starts threads of its own, which would compete with those
# that train; and a multiple of the cache line.
SERIAL_ELEMENTS = 32_640


class Model(NamedTuple):
    """What two peers must have in common to exchange parameters.

    On the wire they are a number of *rows*, each with the bytes of one *block* of values. Without a
    codec every value is a row of its own.

    Attributes:
        checksum: Of the names, shapes and dtypes of all parameters; 64 bits.
        numel: Number of parameters P.
        dtype: Of the flat vector, float32 or float64.
        codec: How it is written on the wire; None for as it is.

    Example:
        >>> from lightning_loco.compression import Int8
        >>> model = Model(7, 10, torch.float32, Int8(block=8))
        >>> model.row_bytes, model.total_bytes, model.elements(offset=12, length=12)
        (12, 24, slice(8, 10, None))
        >>> wire = model.codec.encode(torch.arange(10.0))
        >>> model.read(wire, 8, torch.empty(2))
        tensor([8., 9.])
    """

    checksum: int
    numel: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def wire_format(self) -> int:
        """64 bits that tell how values are written: the codec with its settings, or the dtype."""
        return schema_checksum(str(self.dtype) if self.codec is None else plain(self.codec))

    @property
    def content(self) -> Content:
        """What two workers compare before one reads from the other."""
        return Content(self.checksum, self.wire_format)

    @property
    def block(self) -> int:
        """Values in a row."""
        return 1 if self.codec is None else self.codec.block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize if self.codec is None else self.codec.row_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the parameters on the wire, a number of whole rows."""
        return -(-self.numel // self.block) * self.row_bytes

    @property
    def piece(self) -> int:
        """Values of whole blocks that PyTorch works on in one thread, unless a block is longer."""
        return max(SERIAL_ELEMENTS // self.block, 1) * self.block

    def elements(self, offset: int, length: int) -> slice:
        """Which values stand in the ``length`` bytes from ``offset`` on, which are whole rows."""
        start = offset // self.row_bytes * self.block
        stop = start + length // self.row_bytes * self.block
        return slice(start, min(stop, self.numel))

    def read(self, wire: Tensor, start: int, room: Tensor) -> Tensor:
        """Read as many values as there is room for, in the calling thread alone.

        Args:
            wire: All parameters, as bytes; with a codec, whatever they hold.
            start: The first value, which begins a block.
            room: Where values that a codec has written go; flat.

        Returns:
            The values: ``room``, or the part of ``wire`` in which they stand as they are.
        """
        if self.codec is None:
            return wire.view(self.dtype)[start : start + room.numel()]
        begin = start // self.block * self.row_bytes
        end = begin + self.codec.num_bytes(room.numel())
        return self.codec.decode(wire[begin:end], room, SERIAL_ELEMENTS)


def codec_of_peers(compression: Any) -> Codec | None:
    """The codec in which peers write their parameters.

    Args:
        compression: As users give it, ``"int8"`` say; or such a codec.

    Returns:
        The codec; None if parameters travel as they are.

    Raises:
        TypeError: If it is no compression.
        ValueError: If its name is unknown, it is too rough or has an error feedback.
    """
    made = as_compression(compression, "pull", sends_parameters=True)
    return None if made is None else made.codec
