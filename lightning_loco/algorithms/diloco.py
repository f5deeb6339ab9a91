"""DiLoCo: an outer optimizer steps with the mean pseudo-gradient of the workers."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State, has_own
from lightning_loco.algorithms.merge_policy import Restart
from lightning_loco.algorithms.outer_lr import (
    OuterLR,
    highest_rate,
    new_counter,
    outer_lr_metrics,
)
from lightning_loco.algorithms.outer_momentum import (
    SUMMED,
    OuterMomentum,
    momentum_for,
    new_momentum,
    used_momentum,
)
from lightning_loco.algorithms.outer_optimizer import (
    OuterOptimizer,
    check_outer_optimizer,
    check_outer_sgd,
    largest_stable_contraction,
    step_outer_optimizer,
    step_outer_parameters,
    warn_if_unstable_late,
)
from lightning_loco.algorithms.robust import Aggregate, as_robust_mean
from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class DiLoCo(Algorithm):
    r"""An outer optimizer applies the workers' mean pseudo-gradient to shared parameters.

    .. math::
        \Delta = \frac{1}{N}\sum_i (\Theta - \theta^i), \quad m \leftarrow \mu m + \Delta, \quad
        \Theta \leftarrow \Theta - \eta\,(\Delta + \mu m), \quad \theta^i \leftarrow \Theta

    The outer parameters :math:`\Theta` are equal on all workers. The consensus model is the mean of
    the local parameters. Any inner optimizer can be used; its state is not exchanged.

    Args:
        outer_lr: Outer learning rate :math:`\eta`, positive; or a schedule, from the index of a
            round to its rate, such as ``Cosine(0.9, 0.1, rounds=200)`` or a function.
        outer_momentum: Momentum :math:`\mu` in [0, 1), or ``"auto"``, which follows how much
            successive pseudo-gradients persist, see
            :func:`~lightning_loco.algorithms.outer_momentum.momentum_for`. The paper has 0.9, with
            500 local steps between rounds; with fewer that is often too much.
        nesterov: Nesterov momentum as in ``torch.optim.SGD``; False is heavy ball.
        outer_optimizer: Another outer optimizer, as a callable from a list with one flat parameter
            to a ``torch.optim.Optimizer``, for example
            ``functools.partial(torch.optim.AdamW, lr=0.1)`` or the class itself. The other outer
            arguments are then unused. It sees all parameters as one vector, so optimizers that
            need matrix shapes (Muon) are not supported.
        aggregate: How the pseudo-gradients are averaged: ``"mean"``, or a robust mean that a few
            wrong or hostile workers cannot move far, ``"trimmed_mean"``, ``"geometric_median"`` or
            an object such as ``TrimmedMean(0.1)``. Every worker then receives the messages of all,
            uncompressed.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If ``outer_optimizer`` is not callable, or ``outer_lr`` neither a number nor a
            schedule.

    Source:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
        arXiv:2311.08105.

    Example:
        >>> import torch
        >>> algorithm = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
        >>> state = algorithm.init(torch.zeros(2))
        >>> local = torch.tensor([1.0, 3.0])
        >>> message = algorithm.propose(local, state, RoundInfo())  # outer - local
        >>> message
        tensor([-1., -3.])
        >>> mean = torch.tensor([-1.0, -2.0])
        >>> algorithm.update(None, None, mean, state, RoundInfo())  # the mean of local parameters
        tensor([1., 2.])
    """

    outer_lr: OuterLR = 0.7
    outer_momentum: OuterMomentum = "auto"
    nesterov: bool = True
    outer_optimizer: OuterOptimizer | None = None
    aggregate: Aggregate = "mean"

    exchange = "mean"
    start_key = "outer"
    consensus_key = "outer"
    replicated = True
    summed = SUMMED
    merge_policy = Restart()

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_outer_sgd(self.outer_lr, self.outer_momentum, may_be_auto=True)
        as_robust_mean(self.aggregate)
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                "outer_optimizer must be a callable from parameters to a torch optimizer, got "
                f"{self.outer_optimizer!r}. Pass for example "
                "functools.partial(torch.optim.AdamW, lr=0.1)."
            )
        if self.outer_optimizer is not None and callable(self.outer_lr):
            raise ValueError(
                f"outer_optimizer has its own rate, and outer_lr={self.outer_lr!r} would be "
                "unused. Leave one of them out."
            )

    @property
    def granularity(self) -> int | None:
        """1 if all is elementwise; None if the optimizer or the mean needs the whole vector."""
        robust_mean = as_robust_mean(self.aggregate)
        is_elementwise = robust_mean is None or robust_mean.is_elementwise
        return 1 if self.outer_optimizer is None and is_elementwise else None

    @property
    def gathers(self) -> bool:
        """Whether all messages are needed, for a robust mean."""
        return as_robust_mean(self.aggregate) is not None

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> DiLoCo:
        """Check that there is no topology, and that the outer optimizer can be used."""
        super().prepare(num_workers, topology, is_late=is_late)
        if self.gathers and has_own(self, "weight"):
            raise ValueError(
                f"aggregate={self.aggregate!r} counts all workers alike, because a wrong one could "
                f"send any weight, but {type(self).__name__} gives its messages weights. Use "
                "aggregate='mean'."
            )
        if self.gathers and num_workers == 2:
            warnings.warn(
                f"aggregate={self.aggregate!r} cannot tell which of 2 workers is wrong: it needs 3 "
                "or more. Use aggregate='mean'.",
                stacklevel=2,
            )
        if self.outer_optimizer is not None:
            check_outer_optimizer(self.outer_optimizer)
        elif is_late:
            momentum = self.outer_momentum
            rate = highest_rate(self.outer_lr)
            if momentum == "auto":  # the highest it can choose
                momentum = momentum_for(rate, 0.0)
            warn_if_unstable_late(
                largest_stable_contraction(rate, momentum, self.nesterov),
                f"outer_lr={self.outer_lr} with outer_momentum={self.outer_momentum}",
                "Use outer_momentum=0, or (0.7, 0.3), or (0.2, 0.9).",
            )
        return self

    def init(self, params: Tensor) -> State:
        """Return the outer parameters; what the momentum needs; a counter with a schedule."""
        state: State = {"outer": params, **new_counter(self.outer_lr)}
        if self.outer_optimizer is None:
            state |= new_momentum(self.outer_momentum, params)
        return state

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the pseudo-gradient, outer - local."""
        return torch.sub(state["outer"], params, out=params)

    def combine(self, messages: Tensor, info: RoundInfo) -> Tensor:
        """Return the robust mean of the pseudo-gradients."""
        robust_mean = as_robust_mean(self.aggregate)
        assert robust_mean is not None
        return robust_mean.combine(messages, info.weights)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Take an outer step with the mean pseudo-gradient; return the outer parameters."""
        outer: Tensor = state["outer"]
        if self.outer_optimizer is not None:
            step_outer_optimizer(self.outer_optimizer, outer, received, state)
        else:
            settings = self.outer_lr, self.outer_momentum, self.nesterov
            step_outer_parameters(*settings, received, state, info.start)
        return outer

    def metrics(self, state: State) -> dict[str, float]:
        """Return the outer learning rate and the momentum if they change."""
        metrics = outer_lr_metrics(self.outer_lr, state)
        if self.outer_momentum == "auto" and self.outer_optimizer is None:
            metrics["outer_momentum"] = used_momentum(self.outer_momentum, state)
        return metrics
