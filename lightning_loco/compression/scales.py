"""The scale of a block: its largest magnitude, in the first bytes of its row."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


def write_scales(values: Tensor, rows: Tensor) -> Tensor:
    """Write the scale of each block into its row.

    Args:
        values: Of shape ``(blocks, block)``.
        rows: Of shape ``(blocks, row_bytes)``, a multiple of 4.

    Returns:
        The scales as they will be read, ``(blocks, 1)``.
    """
    scales = read_scales(rows)
    scales.copy_(torch.amax(torch.abs(values), dim=1, keepdim=True))
    return scales


def read_scales(rows: Tensor) -> Tensor:
    """The scales in the rows, ``(blocks, 1)``: float32, in the rows' memory."""
    return rows[:, :SCALE_BYTES].view(torch.float32)


def inverse_scales(scales: Tensor, largest: int) -> Tensor:
    """By what to multiply values, so that the largest of a block becomes ``largest``."""
    return largest / scales.clamp_min(torch.finfo(torch.float32).tiny * largest)
