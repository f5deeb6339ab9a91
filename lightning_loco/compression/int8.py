"""A codec of a quarter of the size: 8-bit integers with a scale for each block."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_loco.compression.codec import Codec, check_block

SCALE_BYTES = 4
"""The scale of a block is a float32 in the first bytes of its row."""

_LARGEST = 127


@dataclasses.dataclass(frozen=True)
class Int8(Codec):
    r"""8-bit integers and one float32 scale for each block.

    .. math:: q = \mathrm{round}(127\, v / s), \quad s = \max_{\text{block}} |v|

    The error is at most :math:`s / 254`.

    Args:
        block: Values that share a scale, a positive multiple of 4.

    Raises:
        TypeError: If ``block`` is not an integer.
        ValueError: If it is out of range.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block, multiple=4)

    @property
    def row_bytes(self) -> int:
        """The scale, and one byte for each value."""
        return SCALE_BYTES + self.block

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Round to the nearest of 255 numbers."""
        scales = write_scales(values, rows)
        scaled = torch.mul(values, inverse_scales(scales, _LARGEST)).round_()
        rows[:, SCALE_BYTES:].view(torch.int8).copy_(scaled)

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Multiply by the scale."""
        values.copy_(rows[:, SCALE_BYTES:].view(torch.int8))
        values.mul_(read_scales(rows).to(values.dtype) / _LARGEST)


def write_scales(values: Tensor, rows: Tensor) -> Tensor:
    """Write the largest magnitude of each block into its row, as the scale; return the scales.

    Blocks are ``(blocks, block)``, rows of bytes ``(blocks, row_bytes)`` with ``row_bytes`` a
    multiple of 4, and scales, as they will be read, ``(blocks, 1)``.
    """
    scales = read_scales(rows)
    scales.copy_(torch.amax(torch.abs(values), dim=1, keepdim=True))
    return scales


def read_scales(rows: Tensor) -> Tensor:
    """Return a view of the scales in the rows: float32, ``(blocks, 1)``."""
    return rows[:, :SCALE_BYTES].view(torch.float32)


def inverse_scales(scales: Tensor, largest: int) -> Tensor:
    """Return the factors that scale the largest magnitude of each block to ``largest``."""
    return largest / scales.clamp_min(torch.finfo(torch.float32).tiny * largest)
