"""What an optimizer must be like to work on another rank."""

from __future__ import annotations

import inspect

import torch


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes gradients itself.

    Raises:
        ValueError: If its step needs a closure, as that of LBFGS does.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_it = closure is not None and closure.default is inspect.Parameter.empty
    if needs_it or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that computes gradients again and again, "
            "but the optimizer is on a rank that computes none. Use one that does not, such as "
            "AdamW or SGD."
        )


def is_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a parameter depends on its own gradient and state alone.

    True for what is in ``torch.optim``, except LBFGS; unknown, so False, for all others.
    """
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not isinstance(optimizer, torch.optim.LBFGS)
