"""Delayed Nesterov: DiLoCo whose momentum is applied once in several rounds."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.algorithms.merge_policy import Restart
from lightning_loco.algorithms.outer_lr import (
    ROUNDS,
    OuterLR,
    highest_rate,
    new_counter,
    next_rate,
    outer_lr_metrics,
)
from lightning_loco.algorithms.outer_optimizer import (
    check_outer_sgd,
    largest_stable_contraction,
    step_outer_sgd,
    warn_if_unstable_late,
)
from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class DelayedNesterov(Algorithm):
    r"""DiLoCo with plain outer steps, and momentum once per block of rounds.

    .. math::
        D \leftarrow D + \Delta, \qquad \Theta \leftarrow \Theta - \eta\,(c\,\mu m + \Delta / n)

    with the workers' mean pseudo-gradient :math:`\Delta`. Every n-th round computes instead

    .. math::
        m \leftarrow \mu m + D / n, \qquad
        \Theta \leftarrow \Theta - \eta\,\big((1 - c\,n + c)\,\mu m + \Delta / n\big), \qquad
        D \leftarrow 0

    With :math:`c = 0` the n rounds of a block equal one Nesterov step with the mean of their
    pseudo-gradients; with :math:`n = 1` it is DiLoCo. As in the paper, each pseudo-gradient is
    divided by n; multiply ``outer_lr`` by n to move as fast as DiLoCo.

    Args:
        outer_lr: Outer learning rate :math:`\eta` of a whole block, positive; or a schedule, from
            the index of a round to its rate.
        outer_momentum: Momentum :math:`\mu` in [0, 1), from one block to the next.
        every: Number of rounds in a block, n, at least 1.
        between: Share of the momentum, c, in [0, 1/n], in each round that does not end a block.

    Raises:
        TypeError: If ``every`` is not an integer.
        ValueError: If a number is out of range.

    Source:
        Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135. In
        the paper the pseudo-gradient of each worker is a step; here a round takes their mean.

    Example:
        >>> algorithm = DelayedNesterov(outer_lr=2.0, outer_momentum=0.5, every=2)
        >>> state = algorithm.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     mean = torch.tensor([-1.0])
        ...     result = algorithm.update(None, None, mean, state, RoundInfo())
        ...     print(result.item())  # plain, then with the momentum of both
        1.0
        3.0
    """

    outer_lr: OuterLR = 1.4
    outer_momentum: float = 0.5
    every: int = 2
    between: float = 0.0

    exchange = "mean"
    start_key = "outer"
    consensus_key = "outer"
    replicated = True
    merge_policy = Restart()

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_outer_sgd(self.outer_lr, self.outer_momentum)
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"every counts rounds and must be an integer, got {self.every!r}.")
        if self.every < 1:
            raise ValueError(
                f"every counts rounds and must be at least 1, got {self.every}. Use 1 for DiLoCo."
            )
        if not 0 <= self.between <= 1 / self.every:
            raise ValueError(
                f"between must be in [0, 1/every], got {self.between} with every={self.every}. "
                "Use 0 for momentum once a block."
            )

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> DelayedNesterov:
        """Check that there is no topology."""
        super().prepare(num_workers, topology, is_late=is_late)
        if is_late:
            rate, momentum = highest_rate(self.outer_lr), self.outer_momentum
            warn_if_unstable_late(
                largest_stable_contraction(rate, momentum, every=self.every),
                f"outer_lr={self.outer_lr} with outer_momentum={momentum} and every={self.every}",
                "Use lower values of both.",
            )
        return self

    def init(self, params: Tensor) -> State:
        """Return the outer parameters; with momentum also its buffer, a block sum, a counter."""
        state: State = {"outer": params, **new_counter(self.outer_lr)}
        if self.outer_momentum > 0:
            state["momentum"] = torch.zeros_like(params)
            if self.every > 1:
                state["block_sum"] = torch.zeros_like(params)
                state[ROUNDS] = 0
        return state

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the pseudo-gradient, outer - local."""
        return torch.sub(state["outer"], params, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Take a plain outer step; at the end of a block, one with momentum."""
        outer: Tensor = state["outer"]
        rate, n = next_rate(self.outer_lr, state), self.every
        if n == 1 or self.outer_momentum == 0:
            momentum = state.get("momentum")
            step_outer_sgd(outer, received, momentum, rate / n, self.outer_momentum, True)
            return outer
        momentum, block_sum, share = state["momentum"], state["block_sum"], self.between
        block_sum.add_(received)
        if state[ROUNDS] % n == 0:
            momentum.mul_(self.outer_momentum).add_(block_sum, alpha=1 / n)
            block_sum.zero_()
            share += 1 - n * self.between
        if share > 0:
            outer.add_(momentum, alpha=-rate * share * self.outer_momentum)
        return outer.add_(received, alpha=-rate / n)

    def metrics(self, state: State) -> dict[str, float]:
        """Return the outer learning rate if it is a schedule."""
        return outer_lr_metrics(self.outer_lr, state)
