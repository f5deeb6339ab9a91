"""What travels at once, and how the values in it are written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.codecs import Codec
from lightning_loco.codecs.sums import add_written


class Span(NamedTuple):
    """The elements ``start`` to ``stop`` of a parameter, seen as one line."""

    param: int
    start: int
    stop: int


class Message(NamedTuple):
    """Parts of some parameters, or of their gradients.

    Attributes:
        spans: Side by side.
        numel: Elements of all spans.
        dtype: Of the values: as they travel, or as the codec takes them.
        codec: Writes the values; None if they travel as they are, in ``dtype``.

    Example:
        >>> from lightning_loco.codecs import Int8
        >>> message = Message((Span(0, 0, 300),), 300, torch.float32, Int8())
        >>> message.wire_dtype, message.num_bytes
        (torch.uint8, 520)
    """

    spans: tuple[Span, ...]
    numel: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of what travels."""
        return self.dtype if self.codec is None else torch.uint8

    @property
    def wire_numel(self) -> int:
        """Elements of what travels."""
        return self.numel if self.codec is None else self.codec.num_bytes(self.numel)

    @property
    def num_bytes(self) -> int:
        """Bytes of what travels."""
        return self.wire_numel * self.wire_dtype.itemsize

    def write(self, values: Tensor, wire: Tensor) -> Tensor:
        """Put values where they travel from; returns that, or the values if they can travel."""
        return values if self.codec is None else self.codec.encode(values, wire)

    def read(self, wire: Tensor, values: Tensor) -> Tensor:
        """Have in ``values`` what has travelled."""
        return values.copy_(wire) if self.codec is None else self.codec.decode(wire, values)

    def add(self, wire: Tensor, total: Tensor) -> Tensor:
        """Add to ``total`` what has travelled."""
        return total.add_(wire) if self.codec is None else add_written(self.codec, wire, total)
