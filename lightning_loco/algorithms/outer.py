"""Any torch optimizer as outer optimizer, with its state kept in the algorithm's state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_loco.algorithms.base import State

_PREFIX = "optimizer."


def step_outer_optimizer(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    outer: Tensor,
    gradient: Tensor,
    state: State,
) -> None:
    """Make one step of a torch optimizer on the outer parameters, in place.

    The optimizer is made anew each time and given its state back, so that all that is remembered
    are entries ``optimizer.<name>`` of ``state``: tensors and numbers.

    Args:
        make_optimizer: Called with a list that holds one flat parameter.
        outer: Outer parameters ``(P,)``, updated in place.
        gradient: Mean pseudo-gradient ``(P,)``.
        state: The algorithm's state.

    Raises:
        TypeError: If the optimizer remembers something else than tensors and numbers.
    """
    parameter = torch.nn.Parameter(outer)
    parameter.grad = gradient
    optimizer = make_optimizer([parameter])
    known = {key.removeprefix(_PREFIX): state[key] for key in state if key.startswith(_PREFIX)}
    if known:
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
