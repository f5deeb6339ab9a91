"""An eighth of the bytes: 4-bit numbers that share a scale with their block."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import torch
from torch import Tensor

from lightning_loco.codecs.base import Codec, check_block
from lightning_loco.codecs.scales import SCALE_BYTES, inverse_scales, read_scales, write_scales


@dataclasses.dataclass(frozen=True)
class _FourBits(Codec):
    block: int = 128

    is_rough = True

    def __post_init__(self) -> None:
        """Check the range."""
        check_block(self.block, multiple=8)

    @property
    def row_bytes(self) -> int:
        """The scale, and a byte for two values."""
        return SCALE_BYTES + self.block // 2

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Write the codes of the first half of a block into the lower bits, the others above."""
        codes = self._codes(values, write_scales(values, rows))
        half = self.block // 2
        torch.add(codes[:, :half], codes[:, half:], alpha=16, out=rows[:, SCALE_BYTES:])

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Look the codes up, and multiply by the scale."""
        packed, half = rows[:, SCALE_BYTES:], self.block // 2
        self._read(packed & 15, values[:, :half])
        self._read(packed >> 4, values[:, half:])
        values.mul_(read_scales(rows))

    @abstractmethod
    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Uint8 from 0 to 15 for each value."""

    @abstractmethod
    def _read(self, codes: Tensor, values: Tensor) -> None:
        """What the codes stand for, between -1 and 1."""


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

    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.mul(values, inverse_scales(scales, 7)).round_().add_(8).to(torch.uint8)

    def _read(self, codes: Tensor, values: Tensor) -> None:
        values.copy_(codes).sub_(8).div_(7)


_LOWEST = 127 - 7  # what the exponent of 2^-7 is stored as, in float32


@dataclasses.dataclass(frozen=True)
class E3M0(_FourBits):
    r"""4-bit floating-point numbers: a sign, three bits of exponent, and a scale for each block.

    They are 0 and :math:`\pm s\, 2^{-k}` for :math:`k = 0 \dots 6`, with the largest magnitude
    :math:`s` of the block. The relative error is at most 1/3 where magnitudes are at least
    :math:`0.75 \cdot 2^{-6} s`; what is smaller becomes 0.

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

    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        # Times 4/3: the exponent alone then rounds to the nearest power of two.
        scaled = torch.mul(values, inverse_scales(scales, 1) * (4 / 3))
        bits = scaled.to(torch.float32).view(torch.int32)
        exponents = bits.bitwise_right_shift(23).bitwise_and_(255).sub_(_LOWEST).clamp_(0, 7)
        return exponents.add_(bits.lt(0), alpha=8).to(torch.uint8)

    def _read(self, codes: Tensor, values: Tensor) -> None:
        exponents = codes & 7
        bits = exponents.to(torch.int32).add_(_LOWEST).bitwise_left_shift_(23)
        torch.mul(bits.view(torch.float32), exponents.ne(0), out=bits.view(torch.float32))
        values.copy_(bits.view(torch.float32))
        values.mul_(1 - 2 * (codes >> 3).to(values.dtype))
