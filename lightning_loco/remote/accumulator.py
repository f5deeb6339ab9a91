"""The memory in which a server sums gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_loco.remote.message import Message


class Accumulator:
    """One number per parameter element, side by side in the order of the messages.

    Args:
        params: The shapes and dtypes.
        messages: How they are cut.

    Attributes:
        dtype: float32, or float64 if any parameter is.
        slices: The memory of each message.
        parts: The memory of each parameter, in its shape.
    """

    def __init__(self, params: Sequence[Tensor], messages: Sequence[Message]) -> None:
        wide = any(param.dtype == torch.float64 for param in params)
        self.dtype = torch.float64 if wide else torch.float32
        self._flat = torch.zeros(sum(param.numel() for param in params), dtype=self.dtype)
        self.slices = torch.split(self._flat, [message.numel for message in messages])
        self.parts: list[Tensor] = [self._flat] * len(params)
        position = 0
        for message in messages:
            for index, start, stop in message.spans:
                if start == 0:
                    shape = params[index].shape
                    self.parts[index] = self._flat[position : position + shape.numel()].view(shape)
                position += stop - start

    def lend(self, index: int, dtype: torch.dtype) -> Tensor:
        """A message's memory, to hold its parameters in their dtype once its sum is not needed."""
        memory: Tensor = self.slices[index]
        return memory.view(dtype)[: memory.numel()]
