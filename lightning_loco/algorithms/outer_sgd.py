"""The built-in outer optimizer: SGD on a flat vector, as ``torch.optim.SGD`` computes it."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim.sgd import sgd


def check_outer_sgd(outer_lr: float, outer_momentum: float) -> None:
    """Refuse numbers out of range.

    Raises:
        ValueError: If the rate is not positive and finite, or the momentum not in [0, 1).
    """
    if not (math.isfinite(outer_lr) and outer_lr > 0):
        raise ValueError(f"outer_lr must be positive, got {outer_lr}. A common value is 0.7.")
    if not 0 <= outer_momentum < 1:
        raise ValueError(
            f"outer_momentum must be in [0, 1), got {outer_momentum}. "
            "Common values are 0.9 for hundreds of local steps, 0.5 for ten, 0 for none."
        )


def step_outer_sgd(
    outer: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
) -> None:
    """Make one step on the outer parameters, in place.

    Args:
        outer: Outer parameters ``(P,)``.
        gradient: Mean pseudo-gradient ``(P,)``; may serve as scratch.
        buffer: The momentum ``(P,)``, changed in place; None if there is none.
        outer_lr: Rate.
        outer_momentum: In [0, 1).
        nesterov: Nesterov momentum; False is heavy ball.
    """
    if buffer is None:
        outer.add_(gradient, alpha=-outer_lr)
        return
    sgd(
        [outer],
        [gradient],
        [buffer],
        fused=True,
        weight_decay=0.0,
        momentum=outer_momentum,
        lr=outer_lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
    )
