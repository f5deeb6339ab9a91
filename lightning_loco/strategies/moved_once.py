"""Tensors that several parts of a state share stay shared when they are moved."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def moved_once(data: Any, device: torch.device) -> Any:
    """A collection with all tensors on a device, where one that it holds twice stays one.

    Fragments of a model share vectors of its whole length, and a file has them once then.
    """
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    return apply_to_collection(data, Tensor, move)
