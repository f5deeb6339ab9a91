"""Whether tensors still hold the same bits, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """One number for each tensor: the sum of its bits, read as integers.

    It is the same on every machine and for every number of threads, and costs one read of the
    memory and one device sync. Values that only changed places within a tensor keep it.

    Example:
        >>> fingerprints([torch.ones(3), torch.zeros(3)]) == fingerprints([torch.ones(3)] * 2)
        False
    """
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors]
    if not sums:
        return []
    device = sums[0].device
    return torch.stack([total.to(device) for total in sums]).tolist()


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()])
