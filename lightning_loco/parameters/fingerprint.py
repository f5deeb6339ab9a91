"""Numbers that tell whether tensors hold the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORD = 8
_PIECE_BYTES = 2**24


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """One number for each tensor: the sum of its memory, read as 64-bit integers.

    It is the same on every machine and for every number of threads, and costs one read of the
    memory and one device sync. Changes that cancel out in the sum go unnoticed: words that only
    changed places, or new signs of as many positive values as negative ones.

    Example:
        >>> fingerprints([torch.ones(3), torch.zeros(3)]) == fingerprints([torch.ones(3)] * 2)
        False
    """
    sums = [_sum(tensor) for tensor in tensors]
    if not sums:
        return []
    device = sums[0].device
    return torch.stack([total.to(device) for total in sums]).tolist()


def crc32(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of the values of a dense tensor.

    Args:
        tensor: On any device.
        start: The checksum of what comes before.

    Example:
        >>> crc32(torch.tensor([1, 0])) == crc32(torch.tensor([0, 1]))
        False
    """
    for piece in pieces(tensor):
        start = zlib.crc32(piece, start)
    return start


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor in order, copied piece by piece.

    The memory of the tensor itself is not given to NumPy, because a storage that NumPy has seen
    can no longer be resized by the code that owns it.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    for piece in torch.split(values.view(torch.uint8), _PIECE_BYTES):
        yield piece.to("cpu", copy=True).numpy().data


def _sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.data_ptr() % _WORD or flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words = raw.numel() // _WORD * _WORD
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)
