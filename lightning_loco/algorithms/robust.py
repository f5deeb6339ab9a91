"""Robust means, which a few wrong or hostile messages among many cannot move far."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class RobustMean(ABC):
    """A mean of vectors that holds if some of them are wrong.

    Every worker computes it from the messages of all, so it takes N - 1 times the bytes of a
    message to receive them and memory for all. The results of workers are equal bit for bit if
    their processors compute alike.
    """

    is_elementwise: ClassVar[bool]
    """Whether each element of the mean depends on that element of the messages only."""

    @abstractmethod
    def combine(self, messages: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the mean ``(P,)``.

        Args:
            messages: One row per worker, ``(N, P)``; only read.
            weights: Of the workers, 1 or 0. A message of weight 0, and one with NaN or infinity, is
                left out; of the others at least one must be left.

        Raises:
            RuntimeError: If no message is left.
        """


@dataclasses.dataclass(frozen=True)
class TrimmedMean(RobustMean):
    r"""The mean of each element without its largest and smallest values.

    .. math:: \frac{1}{n - 2k} \sum_{j=k+1}^{n-k} x_{(j)}, \qquad k = \lceil \beta n \rceil

    with the values :math:`x_{(1)} \le \dots \le x_{(n)}` of an element. It withstands up to k wrong
    messages. If :math:`2k \ge n` it is the median.

    Args:
        trim: Share :math:`\beta` of the messages that are dropped at each end, in (0, 0.5).

    Raises:
        ValueError: If ``trim`` is out of range.

    Source:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        arXiv:1803.01498.

    Example:
        >>> messages = torch.tensor([[1.0], [2.0], [3.0], [900.0]])
        >>> TrimmedMean(0.25).combine(messages, (1, 1, 1, 1))
        tensor([2.5000])
    """

    trim: float = 0.25

    is_elementwise = True

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 < self.trim < 0.5:
            raise ValueError(
                f"trim is the share dropped at each end and must be in (0, 0.5), got {self.trim}. "
                "0.25 withstands one of four workers; for the plain mean use aggregate='mean'."
            )

    def combine(self, messages: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the trimmed mean; see :meth:`RobustMean.combine`."""
        kept = _valid(messages, weights)
        count = len(kept)
        share = math.ceil(self.trim * count - 1e-9)  # 0.07 * 100 is a little more than 7
        dropped = min(share, (count - 1) // 2)
        values = kept.sort(dim=0).values[dropped : count - dropped]
        total = values[0].clone()
        for row in values[1:]:  # in this order on every processor
            total.add_(row)
        return total.div_(len(values))


@dataclasses.dataclass(frozen=True)
class GeometricMedian(RobustMean):
    r"""The point with the smallest sum of distances to the messages.

    .. math:: \arg\min_y \sum_i \lVert x_i - y \rVert

    computed by Weiszfeld's iteration

    .. math::
        y \leftarrow \frac{\sum_i w_i x_i}{\sum_i w_i}, \qquad
        w_i = \frac{1}{\max(\lVert x_i - y \rVert, \epsilon)}

    from the median of each element, with :math:`\epsilon` a tiny share of the median distance. It
    withstands wrong messages of fewer than half of the workers. It needs whole vectors.

    Args:
        iterations: How often the point is moved, at least 1.

    Raises:
        ValueError: If ``iterations`` is out of range.

    Source:
        Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", arXiv:1912.13445.

    Example:
        >>> messages = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.5, 0.5], [900.0, 9.0]])
        >>> GeometricMedian().combine(messages, (1,) * 5).round(decimals=1)
        tensor([0.5000, 0.5000])
    """

    iterations: int = 32

    is_elementwise = False

    def __post_init__(self) -> None:
        """Check the range."""
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int):
            raise TypeError(f"iterations must be an integer, got {self.iterations!r}.")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")

    def combine(self, messages: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the geometric median; see :meth:`RobustMean.combine`."""
        kept = _valid(messages, weights)
        point = TrimmedMean(0.49).combine(kept, (1.0,) * len(kept))
        for _ in range(self.iterations):
            norms = [torch.linalg.vector_norm(row - point, dtype=torch.float64) for row in kept]
            distances = torch.stack(norms)
            smallest = distances.median().mul(1e-9).clamp_(min=1e-30)
            shares = distances.clamp(min=smallest).reciprocal_()
            shares.div_(shares.sum())
            point = torch.mv(kept.t(), shares.to(kept.dtype))
        return point


def is_finite(vector: Tensor) -> bool:
    """Return whether a vector holds neither NaN nor infinity."""
    return bool(torch.isfinite(vector.sum()) or torch.isfinite(vector).all())


def _valid(messages: Tensor, weights: Sequence[float]) -> Tensor:
    """The messages that count, ``(n, P)``; RuntimeError without any."""
    pairs = zip(weights, map(is_finite, messages), strict=True)
    kept = [index for index, (weight, finite) in enumerate(pairs) if weight and finite]
    if not kept:
        raise RuntimeError(
            "No worker has sent a finite message, so there is nothing to average. Lower the "
            "learning rate, or go back to the last checkpoint."
        )
    return messages if len(kept) == len(messages) else messages[kept]


ROBUST_MEANS: dict[str, type[RobustMean]] = {
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
}
"""Robust means by name."""

Aggregate = str | RobustMean
"""``"mean"``, a name of :data:`ROBUST_MEANS`, or a robust mean with its settings."""


def as_robust_mean(aggregate: Aggregate) -> RobustMean | None:
    """Return a robust mean from its name; None for ``"mean"``.

    Raises:
        ValueError: If there is none of this name.
        TypeError: If it is neither a name nor a robust mean.
    """
    if isinstance(aggregate, RobustMean):
        return aggregate
    if not isinstance(aggregate, str):
        raise TypeError(
            f"aggregate must be 'mean', {', '.join(map(repr, ROBUST_MEANS))} or an object such as "
            f"TrimmedMean(0.1), got {aggregate!r}."
        )
    if aggregate == "mean":
        return None
    if aggregate not in ROBUST_MEANS:
        raise ValueError(
            f"Unknown aggregate {aggregate!r}. Use one of 'mean', "
            f"{', '.join(map(repr, ROBUST_MEANS))}."
        )
    return ROBUST_MEANS[aggregate]()
