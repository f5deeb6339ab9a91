"""Codecs of an eighth of the size: 4-bit numbers with a scale for each block."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_loco.compression.codec import Codec, check_block
from lightning_loco.compression.int8 import SCALE_BYTES, inverse_scales, read_scales, write_scales


@dataclasses.dataclass(frozen=True)
class _FourBits(Codec):
    block: int = 128

    levels: ClassVar[tuple[float, ...]]
    """The value of each code, relative to the scale."""

    is_rough = True

    def __post_init__(self) -> None:
        check_block(self.block, multiple=8)

    @property
    def row_bytes(self) -> int:
        """The scale, and one byte for two values."""
        return SCALE_BYTES + self.block // 2

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Write two codes into each byte, the first into its lower bits."""
        pairs = self._codes(values, write_scales(values, rows)).view(torch.int16)
        rows[:, SCALE_BYTES:].copy_(pairs.bitwise_or(pairs.bitwise_right_shift(4)))

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Look up both codes of a byte at once, and multiply by the scale."""
        table = _pairs(self.levels).to(rows.device)
        packed = rows[:, SCALE_BYTES:].to(torch.int32).view(-1)
        read = torch.index_select(table, 0, packed).view(torch.float32)
        torch.mul(read.view(values.shape), read_scales(rows), out=values)

    @abstractmethod
    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return a code from 0 to 15 for each value, as uint8."""


@functools.cache
def _pairs(levels: tuple[float, ...]) -> Tensor:
    """Return the two values of each byte, as one float64 that holds the bits of two float32."""
    values = [[levels[byte & 15], levels[byte >> 4]] for byte in range(256)]
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(torch.float64).view(-1)


@dataclasses.dataclass(frozen=True)
class Int4(_FourBits):
    r"""4-bit integers and one float32 scale for each block.

    .. math:: q = \mathrm{round}(7\, v / s), \quad s = \max_{\text{block}} |v|

    The error is at most :math:`s / 14`.

    Args:
        block: Values that share a scale, a positive multiple of 8.

    Raises:
        TypeError: If ``block`` is not an integer.
        ValueError: If it is out of range.

    Example:
        >>> import torch
        >>> codec = Int4(block=8)
        >>> codec.decode(codec.encode(torch.tensor([7.0, -2.2, 0.4])), torch.empty(3))
        tensor([ 7., -2.,  0.])
    """

    levels = tuple((code - 8) / 7 for code in range(16))

    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.mul(values, inverse_scales(scales, 7)).round_().add_(8).to(torch.uint8)


_LOWEST = 127 - 7  # how float32 stores the exponent of 2^-7
_POWERS = tuple(2.0**exponent for exponent in range(-6, 1))


@dataclasses.dataclass(frozen=True)
class E3M0(_FourBits):
    r"""4-bit floating-point numbers: a sign, three bits of exponent, and a scale for each block.

    They are 0 and :math:`\pm s\, 2^{-k}` for :math:`k = 0 \dots 6`, with the largest magnitude
    :math:`s` of the block. The relative error is at most 1/3 where magnitudes are at least
    :math:`0.75 \cdot 2^{-6} s`; smaller values become 0.

    Args:
        block: Values that share a scale, a positive multiple of 8.

    Raises:
        TypeError: If ``block`` is not an integer.
        ValueError: If it is out of range.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example:
        >>> import torch
        >>> codec = E3M0(block=8)
        >>> codec.decode(codec.encode(torch.tensor([8.0, -3.5, 0.01])), torch.empty(3))
        tensor([ 8., -4.,  0.])
    """

    levels = (0.0, *_POWERS, 0.0, *(-power for power in _POWERS))

    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        # After a multiplication by 4/3 the exponent alone is the nearest power of two. The exponent
        # is in the upper half of a float32, which is the second half on a little-endian machine.
        scaled = torch.mul(values, inverse_scales(scales, 1) * (4 / 3)).to(torch.float32)
        upper = scaled.view(torch.int16)[:, 1::2].contiguous()
        exponents = upper.bitwise_right_shift(7).bitwise_and_(255).sub_(_LOWEST).clamp_(0, 7)
        return exponents.add_(upper.bitwise_right_shift_(12).bitwise_and_(8)).to(torch.uint8)
