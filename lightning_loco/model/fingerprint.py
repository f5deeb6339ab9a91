"""Checksums of tensors and schemas, to find out whether workers hold the same values."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_loco.model.flat import local_tensor

_WORD_BYTES = 8
_PIECE_BYTES = 2**24
_WORDS_IN_CACHE = 2**17
_WORDS_ON_GPU = 2**24


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    r"""Return one number for each tensor: a sum over its memory, read as 64-bit words.

    Word w adds :math:`w ((w \oplus (w \gg 31)) \lor 1)` modulo 2^64. A sum of the words alone
    would miss an element that grows by one unit in the last place while another one shrinks by one,
    which is how the same mean, rounded on two workers, differs. The number is the same on every
    machine and for every number of threads; it costs about three reads of the memory and one device
    sync. An exchange of two words goes unnoticed.

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
    """Return the CRC-32 checksum of a dense tensor's values, continued from ``start``.

    Example:
        >>> crc32(torch.tensor([1, 0])) == crc32(torch.tensor([0, 1]))
        False
    """
    for piece in pieces(tensor):
        start = zlib.crc32(piece, start)
    return start


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Iterate over the bytes of a dense tensor in order, in copies of at most 16 MiB.

    NumPy gets copies because a storage that is shared with NumPy can no longer be resized.
    """
    values = local_tensor(tensor).detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    for piece in torch.split(values.view(torch.uint8), _PIECE_BYTES):
        yield piece.to("cpu", copy=True).numpy().data


def schema_checksum(schema: object) -> int:
    """Return a checksum of 64 bits of nested lists and tuples of strings and numbers.

    Example:
        >>> schema_checksum([("weight", (2, 3))]) == schema_checksum([("weight", (3, 2))])
        False
    """
    digest = hashlib.blake2b(repr(schema).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _sum(tensor: Tensor) -> Tensor:
    flat = local_tensor(tensor).detach().contiguous().reshape(-1)
    if flat.data_ptr() % _WORD_BYTES or flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words = raw.numel() // _WORD_BYTES * _WORD_BYTES
    total = raw[words:].sum(dtype=torch.int64)
    longest = _WORDS_IN_CACHE if raw.device.type == "cpu" else _WORDS_ON_GPU
    for piece in torch.split(raw[:words].view(torch.int64), longest):
        total += (piece >> 31).bitwise_xor_(piece).bitwise_or_(1).mul_(piece).sum()
    return total
