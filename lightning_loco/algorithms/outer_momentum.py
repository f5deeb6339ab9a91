"""Outer momentum: a number, or ``"auto"``, which follows how much pseudo-gradients persist."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import State

OuterMomentum = float | Literal["auto"]
"""A number in [0, 1), or ``"auto"``."""

OUTER_STEP = 1.1
"""The :func:`outer_step` that ``"auto"`` keeps; see docs/results/momentum.md."""

USUAL_STEPS = (0.6, 1.5)
"""Outside this range of :func:`outer_step` training is likely to be worse."""

_HIGHEST = 0.9
_LOWEST_PERSISTENCE = 0.5  # steps that are too long lower it, and more momentum would be worse

_USED = "persistence.momentum"
_SUMS = (
    *("persistence.along", "persistence.squared", "persistence.buffer_squared"),
    *("persistence.elements", "persistence.sampled", "persistence.sent"),
)
SUMMED = frozenset(_SUMS)
"""State entries of ``"auto"`` that every slice adds to; see :attr:`Algorithm.summed`."""

_MOST_ELEMENTS = 2**16
_DIGITS = 1024
"""The momentum is rounded to a multiple of 1 / 1024: processors may differ in the last bits of a
sum, and all workers must use the same momentum."""


def outer_step(outer_lr: float, outer_momentum: float, persistence: float) -> float:
    r"""Return how far an outer step moves along pseudo-gradients that persist.

    .. math:: \eta + \eta\mu\rho + \eta\mu^2\rho^2 + \dots = \frac{\eta}{1 - \mu\rho}

    Example:
        >>> round(outer_step(0.7, 0.9, persistence=0.98), 2)
        5.93
    """
    return outer_lr / (1 - outer_momentum * persistence)


def momentum_for(outer_lr: float, persistence: float) -> float:
    r"""Return the momentum with which an outer step is :data:`OUTER_STEP`, s below.

    .. math:: \mu = \min\left(0.9, \frac{1 - \eta / s}{\max(\rho, 0.5)}\right)

    It is 0 if :math:`\eta \ge s`. A persistence below 0.5 may come from steps that are too long.

    Example:
        >>> [round(momentum_for(0.7, persistence), 2) for persistence in (1.0, 0.7, 0.3)]
        [0.36, 0.52, 0.73]
    """
    found = max(0.0, 1 - outer_lr / OUTER_STEP) / max(persistence, _LOWEST_PERSISTENCE)
    return round(min(_HIGHEST, found) * _DIGITS) / _DIGITS


def persistence_of(cosine: float, momentum: float) -> float:
    r"""Return the persistence from the cosine of a pseudo-gradient and the momentum buffer.

    If pseudo-gradients of equal length have the cosine :math:`\rho^k` with that of k rounds before,

    .. math::
        \cos(\Delta_t, m_{t-1})
        = \rho\,\sqrt{\frac{1 - \mu^2}{(1 - \mu\rho)\,(1 + \mu\rho)}}

    A pseudo-gradient that points against the buffer counts as one that persists: the steps are too
    long, and less momentum makes them shorter.

    Example:
        >>> [round(persistence_of(cosine, momentum=0.9), 2) for cosine in (0.5, 0.1, -0.1)]
        [0.8, 0.22, 1.0]
    """
    if cosine < 0:
        return 1.0
    return cosine / math.sqrt(1 - momentum**2 * (1 - cosine**2))


def new_momentum(outer_momentum: OuterMomentum, params: Tensor) -> State:
    """Return the state entries of a momentum: a buffer, and what ``"auto"`` knows of the rounds."""
    if outer_momentum == 0:
        return {}
    state: State = {"momentum": torch.zeros_like(params)}
    if outer_momentum == "auto":
        sums = {**dict.fromkeys(SUMMED, 0.0), "persistence.elements": float(len(params))}
        state |= {"persistence": 1.0, _USED: 0.0, **sums}
    return state


def used_momentum(outer_momentum: OuterMomentum, state: State) -> float:
    """Return the momentum of the last round, 0 before the first one."""
    return state[_USED] if outer_momentum == "auto" else outer_momentum


def next_momentum(outer_lr: float, gradient: Tensor, state: State, start: int = 0) -> float:
    r"""Return the momentum of a round with ``"auto"``.

    It estimates the persistence of the round before from the buffer that its
    pseudo-gradient was added to, see :func:`persistence_of`, on a fixed sample of the elements, and
    averages it over about two rounds. Elements that a sparse message does not have move by the
    momentum alone, whatever the persistence, so it counts as at least their share.

    Args:
        outer_lr: The outer learning rate; the highest one of a schedule, so that lower ones make
            shorter steps.
        gradient: Mean pseudo-gradient of a slice, only read.
        state: Of the slice; its entries are changed.
        start: Where the slice begins.
    """
    along, squared, buffer_squared, elements, sampled, sent = (float(state[key]) for key in _SUMS)
    if squared * buffer_squared > 0:  # not before the second round
        cosine = along / math.sqrt(squared * buffer_squared)
        found = max(persistence_of(cosine, state[_USED]), 1 - sent / sampled)
        state["persistence"] = (state["persistence"] + found) / 2
    momentum = momentum_for(outer_lr, state["persistence"])
    # Of all elements: the ranks of a worker may own different numbers of them.
    stride = max(1, int(elements) // _MOST_ELEMENTS)
    sample = slice(-start % stride, None, stride)
    last, earlier = gradient[sample].double(), state["momentum"][sample].double()
    sums = (
        *(torch.dot(last, earlier), torch.dot(last, last), torch.dot(earlier, earlier)),
        *(last.new_full((), len(gradient)), last.new_full((), len(last))),
        last.count_nonzero().double(),
    )
    state.update(zip(_SUMS, sums, strict=True))
    state[_USED] = momentum
    return momentum
