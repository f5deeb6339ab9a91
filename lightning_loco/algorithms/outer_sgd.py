"""Which numbers the built-in outer optimizer, SGD, can work with."""

from __future__ import annotations

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
