"""Corrections of stale pseudo-gradients, before they are merged."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class StaleCorrection(ABC):
    """Changes the pseudo-gradient of one learner by its age, or by the outer momentum.

    It is called for each tensor of each push.
    """

    needs_momentum: ClassVar[bool] = False
    """Whether the outer optimizer must be SGD with momentum."""

    @abstractmethod
    def correct(self, delta: Tensor, momentum: Tensor | None, age: int) -> None:
        """Correct a pseudo-gradient in place.

        Args:
            delta: Pseudo-gradient of a tensor, ``(p,)``.
            momentum: Exponential mean of the merged pseudo-gradients, ``(p,)``; only read. None
                without momentum.
            age: Number of merges since the parameters from which the learner started, at least 0.
        """


@dataclasses.dataclass(frozen=True)
class HeLoCo(StaleCorrection):
    r"""Turns pseudo-gradients that contradict the outer momentum towards it.

    With the cosine c between the pseudo-gradient :math:`\Delta` and the momentum m of a tensor,
    :math:`v = m / \lVert m \rVert`, and
    :math:`\kappa = \lVert\Delta\rVert / (\lVert\Delta\rVert + 3 \lVert m \rVert)`, where 3 is
    ``momentum_weight``:

    .. math::
        \Delta \leftarrow \begin{cases}
            \Delta & c \ge c_\mathrm{ok} \\
            \lVert\Delta\rVert \, u / \lVert u \rVert, \quad
            u = (1 - \lambda) \Delta / \lVert\Delta\rVert + \lambda v, \quad
            \lambda = \min(k_d (1 - c) \kappa, 1) & 0 \le c < c_\mathrm{ok} \\
            \Delta - \beta c \lVert\Delta\rVert v, \quad
            \beta = \min(-k_s c \kappa, \beta_\mathrm{max}) & c < 0
        \end{cases}

    The outer optimizer must be SGD with momentum.

    Args:
        keep_above: :math:`c_\mathrm{ok}`, the cosine in [0, 1] from which nothing is changed.
        shrink: :math:`k_s`, at least 0: how much of a contradiction is removed.
        max_shrink: :math:`\beta_\mathrm{max}` in [0, 1].
        turn: :math:`k_d`, at least 0: how far a pseudo-gradient is turned.
        momentum_weight: At least 0; with a larger one less is changed.

    Raises:
        ValueError: If a number is out of range.

    Source:
        Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data and
        device heterogeneity", arXiv:2606.00271; the defaults are those of its table 3.

    Example:
        >>> delta = torch.tensor([-1.0, 0.0])
        >>> HeLoCo().correct(delta, torch.tensor([1.0, 0.0]), age=1)
        >>> delta  # k = 1/4, beta = 1/8
        tensor([-0.8750,  0.0000])
    """

    keep_above: float = 0.2
    shrink: float = 0.5
    max_shrink: float = 0.5
    turn: float = 1.0
    momentum_weight: float = 3.0

    needs_momentum = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, most in (
            ("keep_above", 1.0),
            ("shrink", math.inf),
            ("max_shrink", 1.0),
            ("turn", math.inf),
            ("momentum_weight", math.inf),
        ):
            value = getattr(self, name)
            if not (0 <= value <= most and math.isfinite(value)):
                limits = "at least 0" if most == math.inf else "in [0, 1]"
                raise ValueError(f"{name} of HeLoCo must be {limits}, got {value}.")

    def correct(self, delta: Tensor, momentum: Tensor | None, age: int) -> None:
        """Correct a pseudo-gradient in place; see :meth:`StaleCorrection.correct`."""
        assert momentum is not None
        size, mean_size = _norm(delta), _norm(momentum)
        if size == 0 or mean_size == 0:
            return
        products = delta.to(torch.float64) * momentum
        cosine = float(products.sum()) / (size * mean_size)
        if cosine >= self.keep_above:
            return
        confidence = size / (size + self.momentum_weight * mean_size)
        if cosine < 0:
            beta = min(-self.shrink * cosine * confidence, self.max_shrink)
            delta.add_(momentum, alpha=-beta * cosine * size / mean_size)
            return
        turned = min(self.turn * (1 - cosine) * confidence, 1.0)
        delta.mul_((1 - turned) / size).add_(momentum, alpha=turned / mean_size)
        delta.mul_(size / _norm(delta))  # not 0, since the cosine is not negative


@dataclasses.dataclass(frozen=True)
class CGAD(StaleCorrection):
    r"""Gives stale pseudo-gradients less weight, and none beyond an age.

    .. math::
        \Delta \leftarrow \gamma(\tau) \, e^{-\alpha\tau} \Delta, \qquad
        \gamma(\tau) = \tfrac12 (1 + \cos(\pi \min(\tau / \tau_c, 1)))

    with the age :math:`\tau`. Its authors use Adam as the outer optimizer:
    ``outer_optimizer=functools.partial(torch.optim.Adam, lr=...)``.

    Args:
        decay: :math:`\alpha`, at least 0.
        cutoff: :math:`\tau_c`, the age in merges from which a pseudo-gradient counts for nothing;
            at least 1.

    Raises:
        ValueError: If a number is out of range.

    Source:
        Shah and Sun, "Cosine-Gated Adam-Decay: Drop-In Staleness-Aware Outer Optimization for
        Decoupled DiLoCo", arXiv:2605.09126. The defaults are not theirs.

    Example:
        >>> delta = torch.ones(2)
        >>> CGAD(decay=0.0, cutoff=4).correct(delta, None, age=2)
        >>> delta
        tensor([0.5000, 0.5000])
    """

    decay: float = 0.1
    cutoff: float = 16.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"decay of CGAD must be at least 0, got {self.decay}.")
        if not self.cutoff >= 1:
            raise ValueError(
                f"cutoff of CGAD is an age in merges and must be at least 1, got {self.cutoff}."
            )

    def correct(self, delta: Tensor, momentum: Tensor | None, age: int) -> None:
        """Scale a pseudo-gradient in place; see :meth:`StaleCorrection.correct`."""
        if age > 0:
            gate = (1 + math.cos(math.pi * min(age / self.cutoff, 1.0))) / 2
            delta.mul_(gate * math.exp(-self.decay * age))


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
