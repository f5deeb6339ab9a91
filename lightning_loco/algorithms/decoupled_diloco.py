"""Decoupled DiLoCo: a syncer merges what learners push; no learner waits for another."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import State
from lightning_loco.algorithms.merge_policy import Mix
from lightning_loco.algorithms.outer_lr import OuterLR, new_counter
from lightning_loco.algorithms.outer_momentum import (
    SUMMED,
    OuterMomentum,
    new_momentum,
    used_momentum,
)
from lightning_loco.algorithms.outer_optimizer import (
    OuterOptimizer,
    check_outer_optimizer,
    check_outer_sgd,
    step_outer_optimizer,
    step_outer_parameters,
)
from lightning_loco.algorithms.stale_correction import StaleCorrection

AGGREGATES = ("radial", "mean")
WEIGHTS = ("tokens", "steps", "equal")


class Push(NamedTuple):
    """What a learner says of a pseudo-gradient.

    Attributes:
        steps: Local steps that are in it: those since the learner received the fragment, at least
            1. Steps that a received fragment has overwritten do not count.
        tokens: Tokens, or samples, of these steps.
        age: Number of merges of the fragment since the version that the learner received, at
            least 0.
    """

    steps: int
    tokens: float
    age: int = 0


class TensorRange(NamedTuple):
    """Where a tensor is in the vector of a fragment.

    Attributes:
        begin: Its first element.
        end: The element after its last one.
        is_embedding: Whether its pseudo-gradients are averaged plainly in any case: most rows of
            an embedding do not move in a merge, so its direction says little.
    """

    begin: int
    end: int
    is_embedding: bool = False


@dataclasses.dataclass(frozen=True)
class DecoupledDiLoCo:
    r"""DiLoCo in which a syncer merges the fragments that learners push, without rounds of all.

    The pseudo-gradient of learner i is relative to the fragment as it was received last,
    :math:`\Delta_i = \Theta_i - \theta_i`, before it was mixed with local parameters. The syncer
    weights those that have arrived by :math:`w_i`, with :math:`\sum_i w_i = 1`, merges them tensor
    by tensor, and takes a step of the outer optimizer:

    .. math::
        \Delta = \mathrm{radial\_mean}_i(\Delta_i, w_i), \quad m \leftarrow \mu m + \Delta, \quad
        \Theta \leftarrow \Theta - \eta\,(\Delta + \mu m)

    A learner that receives :math:`\Theta` continues from
    :math:`\theta_i \leftarrow \alpha\,\theta_i + (1 - \alpha)\,\Theta`.

    Args:
        outer_lr: Outer learning rate :math:`\eta`, positive; or a schedule, from the number of
            merges of the fragment to its rate.
        outer_momentum: Momentum :math:`\mu` in [0, 1), or ``"auto"``; see
            :class:`~lightning_loco.algorithms.DiLoCo`.
        nesterov: Nesterov momentum as in ``torch.optim.SGD``; False is heavy ball.
        outer_optimizer: Another outer optimizer; see :class:`~lightning_loco.algorithms.DiLoCo`.
        aggregate: ``"radial"`` for :func:`radial_mean`, or ``"mean"``.
        weight: :math:`w_i` in proportion to ``"tokens"`` squared by steps, to ``"steps"``, or
            ``"equal"``.
        mix: Share :math:`\alpha` in [0, 1] of the local parameters; with 0 the received fragment
            replaces them.
        correction: Changes stale pseudo-gradients before they are merged, such as
            :class:`~lightning_loco.algorithms.HeLoCo`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of range, a name is unknown, or the correction needs a
            momentum that there is none of.

    Source:
        "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428, whose
        pseudo-gradients are relative to the syncer's last version: then a late one also has what
        others have moved. The bound of :func:`radial_mean` is not in the paper.

    Example:
        >>> method = DecoupledDiLoCo(outer_lr=1.0, outer_momentum=0.0)
        >>> state = method.init(torch.tensor([10.0]))
        >>> whole = [TensorRange(0, 1)]
        >>> method.merge(torch.tensor([[2.0]]), [Push(steps=5, tokens=40)], state, whole)
        tensor([8.])
        >>> late = Push(steps=2, tokens=16, age=1)  # began at 10, too
        >>> method.merge(torch.tensor([[1.0]]), [late], state, whole)
        tensor([7.])
    """

    outer_lr: OuterLR = 0.7
    outer_momentum: OuterMomentum = "auto"
    nesterov: bool = True
    outer_optimizer: OuterOptimizer | None = None
    aggregate: Literal["radial", "mean"] = "radial"
    weight: Literal["tokens", "steps", "equal"] = "tokens"
    mix: float = 0.0
    correction: StaleCorrection | None = None

    exchange: ClassVar[Literal["syncer"]] = "syncer"
    default_topology: ClassVar[None] = None

    granularity: ClassVar[int] = 1
    """Fragments of any length are merged; directions are those of the parts of tensors in them."""

    whole_tensors: ClassVar[bool] = False
    replicated: ClassVar[bool] = False
    """Whether a checkpoint saves one state for all workers: no, the syncer has it."""

    def __post_init__(self) -> None:
        """Check types, names and ranges."""
        check_outer_sgd(self.outer_lr, self.outer_momentum, may_be_auto=True)
        Mix(self.mix)
        for name, known in (("aggregate", AGGREGATES), ("weight", WEIGHTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, known))}, got "
                    f"{getattr(self, name)!r}."
                )
        if self.correction is not None and not isinstance(self.correction, StaleCorrection):
            raise TypeError(
                f"correction must be an object such as HeLoCo(), got {self.correction!r}."
            )
        if self.outer_optimizer is not None:
            check_outer_optimizer(self.outer_optimizer)
            if callable(self.outer_lr):
                raise ValueError(
                    f"outer_optimizer has its own rate, and outer_lr={self.outer_lr!r} would be "
                    "unused. Leave one of them out."
                )
        has_momentum = self.outer_optimizer is None and self.outer_momentum != 0
        if self.correction is not None and self.correction.needs_momentum and not has_momentum:
            raise ValueError(
                f"{type(self.correction).__name__} corrects pseudo-gradients towards the outer "
                'momentum, and there is none. Use outer_momentum="auto", or leave correction out.'
            )
        if has_momentum and self.outer_momentum != "auto" and self.mix == 0:
            warnings.warn(
                f"outer_momentum={self.outer_momentum} with mix=0 may learn worse than none, in "
                "particular a high one with few local steps between two merges of a fragment. "
                'Use outer_momentum="auto", or mix=0.5.',
                stacklevel=3,
            )

    def init(self, params: Tensor) -> State:
        """Return the syncer's state of a fragment.

        Args:
            params: Start parameters ``(P,)``, which the state keeps.
        """
        state: State = {"outer": params, **new_counter(self.outer_lr)}
        if self.outer_optimizer is None:
            state |= new_momentum(self.outer_momentum, params)
        return state

    def propose(self, local: Tensor, received: Tensor) -> Tensor:
        """Return a learner's pseudo-gradient ``(P,)``, in a new tensor.

        Args:
            local: Its parameters of the fragment.
            received: The fragment as the learner has received it last.
        """
        return torch.sub(received, local)

    def continue_from(self, received: Tensor, local: Tensor) -> Tensor:
        """Return the parameters with which a learner continues; ``local`` may be overwritten."""
        return Mix(self.mix).merge(received, local, None)

    def weights(self, pushes: Sequence[Push]) -> list[float]:
        """Return the weights of pushes, which add up to 1.

        Raises:
            ValueError: If there is none, or one has no steps or tokens.

        Example:
            >>> DecoupledDiLoCo().weights([Push(steps=1, tokens=8), Push(steps=3, tokens=24)])
            [0.25, 0.75]
        """
        if not pushes:
            raise ValueError("There is no push to merge.")
        for push in pushes:
            if push.steps < 1 or not push.tokens > 0:
                raise ValueError(f"A push needs local steps and tokens, got {push}.")
        if self.weight == "equal":
            found = [1.0] * len(pushes)
        elif self.weight == "steps":
            found = [float(push.steps) for push in pushes]
        else:
            found = [push.tokens**2 / push.steps for push in pushes]
        total = sum(found)
        return [one / total for one in found]

    def merge(
        self,
        deltas: Tensor,
        pushes: Sequence[Push],
        state: State,
        tensors: Sequence[TensorRange],
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Merge what learners have pushed into the syncer's fragment.

        The result depends on the order of the pushes by rounding; the syncer sorts them.

        Args:
            deltas: The pseudo-gradients, ``(M, P)``, finite; may be overwritten.
            pushes: What their learners say of them.
            state: Of :meth:`init`, updated in place.
            tensors: Where the tensors of the fragment are.
            weights: As they were applied in a run that is repeated. Default: :meth:`weights`.

        Returns:
            The new parameters of the fragment, ``(P,)``: a tensor of the state.

        Raises:
            ValueError: As :meth:`weights`.
        """
        weights = self.weights(pushes) if weights is None else weights
        return self.step(self.combine(deltas, pushes, state, tensors, weights), state)

    def combine(
        self,
        deltas: Tensor,
        pushes: Sequence[Push],
        state: State,
        tensors: Sequence[TensorRange],
        weights: Sequence[float],
    ) -> Tensor:
        """Return the mean pseudo-gradient ``(P,)`` of a merge; arguments as of :meth:`merge`."""
        merged = deltas[0] if len(deltas) == 1 else torch.empty_like(deltas[0])
        for begin, end, is_embedding in tensors:
            rows = deltas[:, begin:end]
            if self.correction is not None:
                momentum = None
                if "momentum" in state:
                    momentum = state["momentum"][begin:end]
                    momentum = momentum * (1 - used_momentum(self.outer_momentum, state))
                for row, push in zip(rows, pushes, strict=True):
                    self.correction.correct(row, momentum, push.age)
            if len(rows) > 1:
                is_plain = is_embedding or self.aggregate == "mean"
                average = weighted_mean if is_plain else radial_mean
                merged[begin:end] = average(rows, weights)
        return merged

    def step(self, merged: Tensor, state: State) -> Tensor:
        """Take an outer step with the mean pseudo-gradient; return the new parameters ``(P,)``."""
        outer: Tensor = state["outer"]
        if self.outer_optimizer is not None:
            step_outer_optimizer(self.outer_optimizer, outer, merged, state)
            return outer
        settings = self.outer_lr, self.outer_momentum, self.nesterov
        step_outer_parameters(*settings, merged, state)
        state.update({name: float(state[name]) for name in SUMMED & state.keys()})
        return outer


def weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean of vectors ``(M, p)`` with weights that add up to 1, in this order."""
    mean = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        mean.add_(row, alpha=weight)
    return mean


def radial_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    r"""Return a mean of vectors whose length is the mean of their lengths.

    .. math::
        r\,\frac{u}{\lVert u \rVert}, \qquad
        r = \sum_i w_i \lVert x_i \rVert, \qquad u = \sum_i w_i \frac{x_i}{\lVert x_i \rVert}

    where a zero vector has no direction. The plain mean of M orthogonal vectors is shorter than
    each by :math:`\sqrt M`, so that with more learners steps would become smaller.

    If vectors contradict each other more than orthogonal ones, so that
    :math:`s = \lVert u \rVert \,/ \sqrt{\sum_i w_i^2} < 1` over those that are not zero, the result
    is s times the above plus 1 - s times the plain mean: where directions cancel, rounding would
    decide about a long vector. The result is never longer than r.

    Args:
        rows: The vectors, ``(M, p)``; only read.
        weights: Of the vectors, at least 0; they add up to 1.

    Example:
        >>> radial_mean(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), [0.5, 0.5])  # of length 2
        tensor([1.4142, 1.4142])
        >>> radial_mean(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]), [0.5, 0.5])
        tensor([1., 0.])
    """
    lengths = [float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows]
    radius = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    shares = [
        weight / length if length > 0 else 0.0
        for weight, length in zip(weights, lengths, strict=True)
    ]
    direction = weighted_mean(rows, shares)
    length = float(torch.linalg.vector_norm(direction, dtype=torch.float64))
    orthogonal = sum(w**2 for w, size in zip(weights, lengths, strict=True) if size > 0) ** 0.5
    if length >= orthogonal * (1 - 1e-6):  # rounding of orthogonal vectors does not matter
        return direction.mul_(radius / length) if length > 0 else direction
    share = length / orthogonal
    return weighted_mean(rows, weights).mul_(1 - share).add_(direction, alpha=radius / orthogonal)
