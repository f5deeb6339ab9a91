"""How much the pseudo-gradients of successive rounds point the same way."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ELEMENTS = 2**16
"""Of the elements of a rank that are compared."""


class Products(NamedTuple):
    """Sums over the compared elements of this rank.

    Attributes:
        both: Of the products of the last two pseudo-gradients.
        last: Of the squares of the last one.
        before: Of the squares of the one before.
    """

    both: float
    last: float
    before: float

    @property
    def cosine(self) -> float | None:
        """The persistence; None if a pseudo-gradient was zero, or is not known."""
        size = math.sqrt(self.last * self.before)
        return self.both / size if size > 0 else None


UNKNOWN = Products(math.nan, math.nan, math.nan)


class Persistence:
    r"""Compares the pseudo-gradient of each round of a fragment with that of the round before.

    The persistence is the cosine of the angle between both, from a fixed sample of the elements:

    .. math::
        \rho = \frac{\langle \Delta_t, \Delta_{t-1} \rangle}{|\Delta_t|\,|\Delta_{t-1}|}

    With outer momentum :math:`\mu` pseudo-gradients that point the same way add up to steps of
    about :math:`\eta / (1 - \mu \rho)` times one of them.

    Args:
        num_elements: Number of elements of all fragments on this rank.
    """

    def __init__(self, num_elements: int) -> None:
        self._stride = max(1, num_elements // MOST_ELEMENTS)
        self._parts: list[Tensor] = []
        self._before: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add the next part of a round's pseudo-gradient, which is copied."""
        self._parts.append(gradient[:: self._stride].clone())

    def end_round(self) -> Products:
        """Compare what was added with the round before; unknown after the first one."""
        if not self._parts:
            return UNKNOWN
        last, before = torch.cat(self._parts), self._before
        self._parts, self._before = [], last
        if before is None or before.shape != last.shape:
            return UNKNOWN
        pairs = (last, before), (last, last), (before, before)
        return Products(*torch.stack([torch.dot(*pair) for pair in pairs]).tolist())
