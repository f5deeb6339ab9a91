"""Norms of flat vectors on the CPU, block by block, so that a block is still in the cache.

For the thread that trains, with PyTorch's threads; what comes from peers is looked at in one thread
beside it, by ``nearness.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 2**17


def norm_of(values: Tensor) -> float:
    """The norm of ``values`` ``(P,)``; not finite if one is not, or if a square is too large."""
    return math.sqrt(sum(map(_squared, torch.split(values, _BLOCK))))


def copy_with_norm(values: Tensor, into: Tensor) -> float:
    """Copy ``values`` ``(P,)`` and return the norm of the copy, in one pass over the memory."""
    squares = 0.0
    for source, target in zip(torch.split(values, _BLOCK), torch.split(into, _BLOCK), strict=True):
        squares += _squared(target.copy_(source))
    return math.sqrt(squares)


def _squared(block: Tensor) -> float:
    return float(torch.dot(block, block))
