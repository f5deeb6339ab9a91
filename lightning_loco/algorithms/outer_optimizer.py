"""Torch optimizers as outer optimizers, with their state in the algorithm's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms.base import State

_PREFIX = "optimizer."


def check_outer_optimizer(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """Check an outer optimizer by two steps on a small vector.

    Raises:
        ValueError: If the optimizer cannot step on a flat vector with its state kept outside.
    """
    name = getattr(make_optimizer, "__name__", repr(make_optimizer))
    outer, state = torch.zeros(2), State()
    try:
        probe = make_optimizer([torch.nn.Parameter(outer.clone())])
        if not isinstance(probe, torch.optim.Optimizer):
            raise TypeError(f"it returned {probe!r} instead of a torch optimizer")
        settings = _settings(probe)
        for _ in range(2):
            stepped = step_outer_optimizer(make_optimizer, outer, torch.ones(2), state)
            if _settings(stepped) != settings:
                raise TypeError("it keeps numbers in param_groups, which would be lost")
    except Exception as error:
        raise ValueError(
            f"{name} cannot be an outer optimizer: {error}. It must step on one flat vector, "
            "without a closure, like torch.optim.AdamW."
        ) from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def step_outer_optimizer(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    outer: Tensor,
    gradient: Tensor,
    state: State,
) -> torch.optim.Optimizer:
    """Make one step of a torch optimizer on the outer parameters, in place.

    The optimizer is created for each step and its state restored, so its state is saved as entries
    ``optimizer.<name>`` of ``state``: tensors and numbers.

    Args:
        make_optimizer: Called with a list that holds one flat parameter.
        outer: Outer parameters ``(P,)``, updated in place.
        gradient: Mean pseudo-gradient ``(P,)``.
        state: The algorithm's state.

    Returns:
        The optimizer after its step.

    Raises:
        TypeError: If the optimizer's state contains anything but tensors and numbers.
    """
    parameter = torch.nn.Parameter(outer)
    parameter.grad = gradient
    optimizer = make_optimizer([parameter])
    known = {key.removeprefix(_PREFIX): state[key] for key in state if key.startswith(_PREFIX)}
    tensors = [value for value in known.values() if isinstance(value, Tensor)]
    if any(t.shape == parameter.shape and t.device != parameter.device for t in tensors):
        # Moves tensors from a checkpoint to the device on which this optimizer keeps them.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: known}, "param_groups": groups})
    elif known:
        optimizer.state[parameter] = known
    optimizer.step()
    for key, value in optimizer.state[parameter].items():
        if value is None:
            continue
        if not isinstance(value, (Tensor, int, float)):
            raise TypeError(
                f"{type(optimizer).__name__} cannot be an outer optimizer: its state {key!r} is a "
                f"{type(value).__name__}, and only tensors and numbers can be checkpointed."
            )
        state[_PREFIX + key] = value
    return optimizer
