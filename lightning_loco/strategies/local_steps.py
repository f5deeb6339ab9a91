"""What a local step is: how many were made with several optimizers, and their loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class LocalSteps:
    """Counts the steps of each optimizer; local steps are those of the one that has made most."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self._most = 0

    def is_next(self, optimizer: Optimizer) -> bool:
        """Whether the coming step of an optimizer is one local step more."""
        return self._done.get(id(optimizer), 0) == self._most

    def is_new(self, optimizer: Optimizer) -> bool:
        """Count one step of an optimizer; whether it is one local step more."""
        is_next = self.is_next(optimizer)
        self._done[id(optimizer)] = self._done.get(id(optimizer), 0) + 1
        self._most += is_next
        return is_next


def loss_in(output: Any) -> Tensor | float:
    """The loss that ``training_step`` has returned, detached; NaN if that is not one number."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss.detach() if loss.numel() == 1 else math.nan
    return float(loss) if isinstance(loss, (int, float)) else math.nan
