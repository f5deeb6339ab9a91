"""The contract of every codec: flat tensors become bytes, block by block, and bytes tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """How values are written on the wire, and what of them is lost there.

    Values are written in blocks of equal length, each into a row of bytes of its own: whoever cuts
    bytes between two rows cuts values between two blocks. The last block is filled up with zeros.
    The same bytes become the same values everywhere. A NaN or an infinity may make all of its block
    NaN or infinite, and nothing else. Subclasses are frozen dataclasses of settings.

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
    """Values that are encoded at once: they stay in the processor's cache from one operation to the
    next."""

    is_sparse: ClassVar[bool] = False
    """Whether most values of a message are left out, so that sums of messages are no such ones."""

    is_rough: ClassVar[bool] = False
    """Whether so much is lost that it must go with the next message, or training suffers."""

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
        """Write blocks.

        Args:
            values: Float32 or float64, of shape ``(blocks, block)``; only read.
            rows: Uint8, of shape ``(blocks, row_bytes)``.
        """

    @abstractmethod
    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Read blocks, whatever bytes they hold; the other way round than :meth:`encode_blocks`."""

    def num_blocks(self, numel: int) -> int:
        """How many blocks so many values are."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """How many bytes so many values become."""
        return self.num_blocks(numel) * self.row_bytes

    def encode(self, values: Tensor, wire: Tensor | None = None) -> Tensor:
        """Write values.

        Args:
            values: Flat, float32 or float64; only read.
            wire: Where to; flat uint8 of :meth:`num_bytes`. Default: new memory.

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
        """Read values.

        Args:
            wire: What :meth:`encode` has written, or any other bytes of that number.
            values: Where to; flat, float32 or float64.
            at_once: About how many to read at once, at least a block. Default: :attr:`at_once`.

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
        """Where values and their bytes are, a piece that fits the cache after the other."""
        blocks, longest = self.num_blocks(values.numel()), self._longest_piece(values, self.at_once)
        for first in range(0, blocks, longest):
            last = min(first + longest, blocks)
            yield (
                slice(first * self.block, min(last * self.block, values.numel())),
                slice(first * self.row_bytes, last * self.row_bytes),
            )

    def _longest_piece(self, values: Tensor, at_once: int) -> int:
        """In blocks; on a GPU there is one piece."""
        is_near = values.device.type == "cpu"
        return max(1, at_once // self.block if is_near else self.num_blocks(values.numel()))

    def _blocks(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole blocks, and what is left."""
        whole = values.numel() - values.numel() % self.block
        return values[:whole].view(-1, self.block), values[whole:]


def check_block(block: int, multiple: int) -> None:
    """Refuse what cannot be the length of a block.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is not positive, or no multiple of what the codec needs.
    """
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block counts values and must be an integer, got {block!r}.")
    if block < 1 or block % multiple:
        raise ValueError(
            f"block counts values that share a scale and must be a positive multiple of {multiple},"
            f" got {block}."
        )
