"""When an outer optimizer stays stable although its gradients come one round late."""

from __future__ import annotations

import torch


def largest_stable_contraction(
    outer_lr: float, momentum: float, nesterov: bool = True, delay: int = 1
) -> float:
    r"""Find how far local steps may go in a round for a delayed outer SGD to be stable.

    On a quadratic a local phase moves a worker the fraction :math:`k` of the way to its optimum, so
    the error follows :math:`e_{t+1} = e_t - \eta\,(\Delta_t + \mu m_{t+1})` with
    :math:`\Delta_t = k\,e_{t-d}` and :math:`m_{t+1} = \mu m_t + \Delta_t` (heavy ball: only
    :math:`m_{t+1}`). Convex problems have :math:`0 < k \le 1`; a result of at least 1 is safe.

    Args:
        outer_lr: Outer learning rate, positive.
        momentum: Outer momentum in [0, 1).
        nesterov: Nesterov instead of heavy ball.
        delay: Rounds between sending and applying, at least 0.

    Returns:
        The largest stable k, searched up to 2.

    Example:
        >>> round(largest_stable_contraction(0.7, 0.9), 2)
        0.36
        >>> round(largest_stable_contraction(0.7, 0.0), 2)
        1.43
    """
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        if _spectral_radius(outer_lr, momentum, nesterov, delay, middle) < 1:
            low = middle
        else:
            high = middle
    return low


def _spectral_radius(
    outer_lr: float, momentum: float, nesterov: bool, delay: int, contraction: float
) -> float:
    """Radius of the linear map on (e_t, ..., e_{t-delay}, m_t)."""
    size = delay + 2
    step = torch.zeros(size, size, dtype=torch.float64)
    oldest, buffer = delay, delay + 1
    step[buffer, buffer] = momentum
    step[buffer, oldest] += contraction
    step[0, 0] += 1
    step[0] -= outer_lr * (momentum if nesterov else 1.0) * step[buffer]
    if nesterov:
        step[0, oldest] -= outer_lr * contraction
    for age in range(1, delay + 1):
        step[age, age - 1] = 1
    return float(torch.linalg.eigvals(step).abs().max())
