"""The base class of all codecs: they encode flat tensors as bytes, block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """Encodes flat tensors as bytes and decodes them, usually with a loss of precision.

    Values are encoded in blocks of equal length. Each block becomes one row of bytes, so an encoded
    message can be split between any two rows. The last block is padded with zeros. Decoding is
    deterministic: the same bytes give the same values on every worker. A NaN or an infinity may
    make its whole block NaN or infinite, but no other block. Subclasses are frozen dataclasses of
    settings.

    Example:
        >>> import torch
        >>> from lightning_loco.compression import Int8
        >>> codec = Int8(block=4)
        >>> values = torch.tensor([1.0, -0.5, 0.0, 127.0, 3.0])
        >>> wire = codec.encode(values)
        >>> wire.dtype, len(wire)
        (torch.uint8, 16)
        >>> codec.decode(wire, torch.empty(5))
        tensor([  1.,   0.,   0., 127.,   3.])
    """

    at_once: ClassVar[int] = 2**16
    """Number of values that are encoded in one go, small enough to remain in the processor's cache
    between operations."""

    is_sparse: ClassVar[bool] = False
    """Whether most values of a message are dropped, so that a sum of messages is not sparse."""

    is_rough: ClassVar[bool] = False
    """Whether the loss is so large that training needs an error feedback."""

    @property
    def averages_senders(self) -> bool:
        """Whether a value is averaged over the workers that have sent it.

        Only for sparse codecs, with which every worker receives the messages of all.
        """
        return False

    @property
    @abstractmethod
    def block(self) -> int:
        """Values in a block."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of an encoded block."""

    @abstractmethod
    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Encode whole blocks.

        Args:
            values: Float32 or float64, of shape ``(blocks, block)``; only read.
            rows: Memory for the bytes, uint8, of shape ``(blocks, row_bytes)``.
        """

    @abstractmethod
    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Decode whole blocks, the inverse of :meth:`encode_blocks`; any bytes are accepted."""

    def num_blocks(self, numel: int) -> int:
        """Return the number of blocks of ``numel`` values."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes of ``numel`` encoded values."""
        return self.num_blocks(numel) * self.row_bytes

    def encode(self, values: Tensor, wire: Tensor | None = None) -> Tensor:
        """Encode values.

        Args:
            values: Flat, float32 or float64; only read.
            wire: Memory for the bytes, flat uint8 of :meth:`num_bytes`. Default: new memory.

        Returns:
            The bytes.
        """
        if wire is None:
            size = self.num_bytes(values.numel())
            wire = torch.empty(size, dtype=torch.uint8, device=values.device)
        for part, written in self.pieces(values):
            rows = wire[written].view(-1, self.row_bytes)
            whole, rest = self._blocks(values[part])
            if len(whole):
                self.encode_blocks(whole, rows[: len(whole)])
            if rest.numel():
                last = whole.new_zeros(1, self.block)
                last[0, : rest.numel()] = rest
                self.encode_blocks(last, rows[len(whole) :])
        return wire

    def decode(self, wire: Tensor, values: Tensor, at_once: int | None = None) -> Tensor:
        """Decode values.

        Args:
            wire: The result of :meth:`encode`, or any other bytes of that length.
            values: Memory for the values; flat, float32 or float64.
            at_once: About how many values to decode in one go, at least a block. Default:
                :attr:`at_once`.

        Returns:
            The values.
        """
        rows = wire[: self.num_bytes(values.numel())].view(-1, self.row_bytes)
        whole, rest = self._blocks(values)
        if len(whole):
            longest = self._longest_piece(values, at_once or self.at_once)
            split = torch.split(rows[: len(whole)], longest), torch.split(whole, longest)
            for written, piece in zip(*split, strict=True):
                self.decode_blocks(written, piece)
        if rest.numel():
            last = whole.new_empty(1, self.block)
            self.decode_blocks(rows[len(whole) :], last)
            rest.copy_(last[0, : rest.numel()])
        return values

    def pieces(self, values: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield the slices of values and of their bytes, in pieces that fit the cache."""
        blocks, longest = self.num_blocks(values.numel()), self._longest_piece(values, self.at_once)
        for first in range(0, blocks, longest):
            last = min(first + longest, blocks)
            yield (
                slice(first * self.block, min(last * self.block, values.numel())),
                slice(first * self.row_bytes, last * self.row_bytes),
            )

    def _longest_piece(self, values: Tensor, at_once: int) -> int:
        """Return the length of a piece in blocks; on a GPU there is only one piece."""
        is_on_cpu = values.device.type == "cpu"
        return max(1, at_once // self.block if is_on_cpu else self.num_blocks(values.numel()))

    def _blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split values into whole blocks and the remainder."""
        whole = values.numel() - values.numel() % self.block
        return values[:whole].view(-1, self.block), values[whole:]


def check_block(block: int, multiple: int) -> None:
    """Raise TypeError or ValueError unless a block is a positive multiple of ``multiple``."""
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block counts values and must be an integer, got {block!r}.")
    if block < 1 or block % multiple:
        raise ValueError(
            f"block counts values that share a scale and must be a positive multiple of {multiple},"
            f" got {block}."
        )
