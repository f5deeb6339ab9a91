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


def step_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Make the step; one that turns out to need a closure is a TypeError that says so."""
    try:
        optimizer.step()
    except TypeError as error:
        name = type(optimizer).__name__
        raise TypeError(
            f"{name}.step() has failed without a closure: {error}. A closure computes gradients "
            f"again, which the rank of the optimizer cannot. If {name} needs one, use one that "
            "does not, such as AdamW or SGD."
        ) from error


def is_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a parameter depends on its own gradient and state alone.

    True for what is in ``torch.optim``, except LBFGS; unknown, so False, for all others.
    """
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not isinstance(optimizer, torch.optim.LBFGS)
