"""The built-in outer optimizer: SGD on a flat vector, as ``torch.optim.SGD`` computes it."""

from __future__ import annotations

from torch import Tensor
from torch.optim.sgd import sgd

from lightning_loco.algorithms.outer_lr import OuterLR, check_outer_lr


def check_outer_sgd(outer_lr: OuterLR, outer_momentum: float) -> None:
    """Refuse numbers out of range.

    Raises:
        TypeError: If the rate is neither a number nor a schedule.
        ValueError: If the rate is not positive and finite, or the momentum not in [0, 1).
    """
    check_outer_lr(outer_lr)
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
