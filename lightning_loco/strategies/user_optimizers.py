"""What the strategies of workers look for in the optimizers that the user has configured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def optimized_by(optimizers: Sequence[Optimizer]) -> list[Tensor] | None:
    """The parameters that optimizers step; None if they have none, so that nothing is known."""
    found = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return found or None


def check_left_out(left_out: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Raise RuntimeError if an optimizer has got a parameter that is not exchanged.

    Args:
        left_out: Names and parameters that no optimizer had at the start.
        optimizers: As they are now.
    """
    optimized = {id(p) for p in optimized_by(optimizers) or ()} if left_out else set()
    for name, parameter in left_out:
        if id(parameter) in optimized:
            raise RuntimeError(
                f"Parameter {name!r} was given to an optimizer during fit, but only parameters "
                "that one has at its start are exchanged. Return it from configure_optimizers, or "
                "call fit again with it."
            )


def clear_non_finite(optimizers: Sequence[Optimizer]) -> None:
    """Zero what NaN and infinity have left in the memory of the optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
