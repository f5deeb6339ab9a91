"""Stability of an outer optimizer whose gradients are applied one round late."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_stable_contraction(
    outer_lr: float,
    momentum: float,
    nesterov: bool = True,
    delay: int = 1,
    *,
    every: int = 1,
    share: float = 0.0,
) -> float:
    r"""Compute how far local steps may move in a round for a delayed outer SGD to be stable.

    On a quadratic, the local steps of a round move a worker by a fraction :math:`k` of the way to
    its optimum, so the error follows :math:`e_{t+1} = e_t - \eta\,(\Delta_t + \mu m_{t+1})` with
    :math:`\Delta_t = k\,e_{t-d}` and :math:`m_{t+1} = \mu m_t + \Delta_t` (heavy ball: only
    :math:`m_{t+1}`). Convex problems have :math:`0 < k \le 1`; a result of at least 1 is safe.

    Args:
        outer_lr: Outer learning rate, positive.
        momentum: Outer momentum in [0, 1).
        nesterov: Whether the momentum is Nesterov's instead of heavy ball.
        delay: Rounds between sending and applying, at least 0.
        every: Number of rounds in a block, as in ``DelayedNesterov``.
        share: Share of a pseudo-gradient that is applied without delay, as in ``EagerDiLoCo``.

    Returns:
        The largest stable k, at most 2.

    Example:
        >>> round(largest_stable_contraction(0.7, 0.9), 2)
        0.36
        >>> round(largest_stable_contraction(0.7, 0.0), 2)
        1.43
        >>> round(largest_stable_contraction(0.7, 0.0, share=0.5), 2)
        2.0
    """
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        gradient = torch.zeros(delay + 3, dtype=torch.float64)
        gradient[delay] += middle * (1 - share)
        gradient[0] += middle * share
        if _spectral_radius(outer_lr, momentum, nesterov, gradient, every) < 1:
            low = middle
        else:
            high = middle
    return low


def _spectral_radius(
    outer_lr: float, momentum: float, nesterov: bool, gradient: Tensor, every: int
) -> float:
    """Return the radius of the linear map of a block on (e_t, ..., e_{t-delay}, m_t, block sum).

    ``gradient`` is the pseudo-gradient of a round, as a row vector on that state.
    """
    size = len(gradient)
    buffer, block_sum = size - 2, size - 1
    block = torch.eye(size, dtype=torch.float64)
    for number in range(1, every + 1):
        step = torch.zeros(size, size, dtype=torch.float64)
        for age in range(1, buffer):
            step[age, age - 1] = 1
        step[0, 0] = step[buffer, buffer] = step[block_sum, block_sum] = 1
        step[block_sum] += gradient
        if nesterov:
            step[0] -= outer_lr / every * gradient
        if number == every:
            step[buffer] = momentum * step[buffer] + step[block_sum] / every
            step[block_sum] = 0
            step[0] -= outer_lr * (momentum if nesterov else 1.0) * step[buffer]
        block = step @ block
    return float(torch.linalg.eigvals(block).abs().max())
