"""Codecs of half the size: 16-bit floating-point numbers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from lightning_loco.compression.codec import Codec

_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class _Narrow(Codec):
    dtype: ClassVar[torch.dtype]

    @property
    def block(self) -> int:
        """Values are encoded one by one; blocks only say where messages may be split."""
        return _BLOCK

    @property
    def row_bytes(self) -> int:
        """Two bytes for each value."""
        return _BLOCK * self.dtype.itemsize

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Round to the nearest number."""
        rows.view(self.dtype).copy_(values)

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Widen the values, which is exact."""
        values.copy_(rows.view(self.dtype))


@dataclasses.dataclass(frozen=True)
class BFloat16(_Narrow):
    """bfloat16: the range of float32, with a relative error of at most 2^-9.

    Example:
        >>> import torch
        >>> codec = BFloat16()
        >>> codec.decode(codec.encode(torch.tensor([1.01])), torch.empty(1))
        tensor([1.0078])
    """

    dtype = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Float16(_Narrow):
    """float16: a relative error of at most 2^-12 where magnitudes are between 6e-5 and 65504.

    Larger values are clamped to 65504, and smaller values lose precision.

    Source:
        Jaghouar et al., "OpenDiLoCo", arXiv:2407.07852: no degradation of pseudo-gradients.

    Example:
        >>> import torch
        >>> codec = Float16()
        >>> codec.decode(codec.encode(torch.tensor([1.01, -1e9])), torch.empty(2))
        tensor([ 1.0098e+00, -6.5504e+04])
    """

    dtype = torch.float16

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Round to the nearest number. Finite values remain finite; infinity becomes NaN."""
        longest = torch.finfo(torch.float16).max
        rows.view(self.dtype).copy_(values.clamp(-longest, longest).add_(values, alpha=0))
