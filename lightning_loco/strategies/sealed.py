"""Content that says whose it is and of which save, and that notices when a bit has changed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_loco.comm.fingerprint import crc32

_SEAL = "seal"
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def seal(content: dict[str, Any], stamp: str, worker: int | None) -> dict[str, Any]:
    """Add a seal.

    Args:
        content: Plain values and tensors.
        stamp: The name of the save that it belongs to.
        worker: Whose it is; None if it is all workers'.
    """
    made = {"stamp": stamp, "worker": worker, "checksum": checksum(content)}
    return {**content, _SEAL: made}


def unseal(sealed: Any, stamp: str, worker: int | None) -> dict[str, Any]:
    """The content behind a seal.

    Args:
        sealed: What was read.
        stamp: The name of the save that it must belong to.
        worker: Whose it must be.

    Raises:
        ValueError: If it is another worker's or of another save, or has changed.
    """
    content = dict(sealed) if isinstance(sealed, Mapping) else {}
    found = content.pop(_SEAL, None)
    if not isinstance(found, Mapping) or set(found) != {"stamp", "worker", "checksum"}:
        raise ValueError("has no seal of lightning_loco")
    if (found["stamp"], found["worker"]) != (stamp, worker):
        raise ValueError(
            f"belongs to {_owner(found['worker'])} in save {found['stamp']!r}, not to "
            f"{_owner(worker)} in save {stamp!r}"
        )
    if found["checksum"] != checksum(content):
        raise ValueError("has changed since it was written: its checksum does not fit")
    return content


def checksum(content: Any, start: int = 0) -> int:
    """CRC-32 of plain values and dense tensors, in their order.

    Args:
        content: Mappings, sequences, sets, tensors, numbers, texts and the like. Of objects of
            other kinds, only the kind counts.
        start: The checksum of what comes before.

    Example:
        >>> checksum({"lr": 0.1}) == checksum({"lr": 0.2})
        False
    """
    if isinstance(content, Tensor):
        start = zlib.crc32(f"{content.dtype}{tuple(content.shape)}".encode(), start)
        if content.layout is not torch.strided or content.is_quantized:
            return start
        return crc32(content, start)
    if isinstance(content, Mapping):
        for key, value in content.items():
            start = checksum(value, zlib.crc32(f"{key!r}:".encode(), start))
        return zlib.crc32(b"}", start)
    if isinstance(content, (list, tuple)):
        for value in content:
            start = checksum(value, zlib.crc32(b",", start))
        return zlib.crc32(b"]", start)
    if isinstance(content, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(repr, content))).encode(), start)
    text = repr(content) if isinstance(content, _PLAIN) else type(content).__qualname__
    return zlib.crc32(text.encode(), start)


def _owner(worker: Any) -> str:
    return "all workers" if worker is None else f"worker {worker}"
