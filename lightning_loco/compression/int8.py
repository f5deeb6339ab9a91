"""A quarter of the bytes: 8-bit integers that share a scale with their block."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_loco.compression.base import Codec, check_block
from lightning_loco.compression.scales import SCALE_BYTES, inverse_scales, read_scales, write_scales

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
        """Check the range."""
        check_block(self.block, multiple=4)

    @property
    def row_bytes(self) -> int:
        """The scale, and a byte for each value."""
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
