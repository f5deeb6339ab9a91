"""What optimizers remember of gradients that were not finite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def clear_non_finite(optimizers: Sequence[Optimizer]) -> None:
    """Zero what NaN and infinity have left in the memory of the optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
