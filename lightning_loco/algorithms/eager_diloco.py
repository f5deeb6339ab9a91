"""Eager DiLoCo: a worker applies its own part of the mean without delay."""

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
    rate_at,
)
from lightning_loco.algorithms.outer_optimizer import (
    check_outer_sgd,
    largest_stable_contraction,
    step_outer_sgd,
    warn_if_unstable_late,
)
from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class EagerDiLoCo(Algorithm):
    r"""DiLoCo with overlap in which each worker applies its own share of the mean immediately.

    At the end of round t a worker has its own pseudo-gradient of round t and the mean of round
    t - 1. It takes an outer step with

    .. math::
        \tilde\Delta^i_t = \tfrac{1}{N} \Delta^i_t
        + \big(\bar\Delta_{t-1} - \tfrac{1}{N} \Delta^i_{t-1}\big)

    on its own outer parameters, as :class:`~lightning_loco.algorithms.DiLoCo` does with the
    mean. The corrections telescope: all of every worker's progress is applied everywhere, and the
    distance between the workers' outer parameters is bounded. The consensus model is their mean.
    Without overlap, in the first round of a warm start, and with one worker it is DiLoCo.

    When a pending result is applied without a new message, as at the end of training, the last step
    is corrected: momentum and outer parameters become what they would be if the mean had been known
    at that step.

    Args:
        outer_lr: Outer learning rate, positive; or a schedule, from the index of an outer step to
            its rate.
        outer_momentum: Momentum in [0, 1).
        nesterov: Nesterov momentum as in ``torch.optim.SGD``; False is heavy ball.
        share: The share that a worker applies immediately, 1/N; set by :meth:`prepare`.

    Raises:
        ValueError: If a number is out of range.

    Source:
        Kale, Douillard, Donchev, "Eager Updates For Overlapped Communication and Computation in
        DiLoCo", arXiv:2502.12996.

    Example:
        >>> algorithm = EagerDiLoCo(outer_lr=1.0, outer_momentum=0.0, share=0.5)
        >>> state = algorithm.init(torch.zeros(1))
        >>> algorithm.on_send(torch.tensor([-2.0]), None, state, RoundInfo())  # half of its step
        tensor([1.])
        >>> mean = torch.tensor([-3.0])  # of the two workers
        >>> zero = torch.tensor([0.0])
        >>> algorithm.on_send(zero, (None, None, mean), state, RoundInfo())  # the rest, and theirs
        tensor([3.])
    """

    outer_lr: OuterLR = 0.7
    outer_momentum: float = 0.0
    nesterov: bool = True
    share: float = dataclasses.field(default=1.0, metadata={"prepared": True})

    exchange = "mean"
    start_key = "outer"
    merge_policy = Restart()

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_outer_sgd(self.outer_lr, self.outer_momentum)

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> EagerDiLoCo:
        """Check that there is no topology, and set the share of a worker."""
        super().prepare(num_workers, topology, is_late=is_late)
        if is_late:
            rate, momentum, share = (
                highest_rate(self.outer_lr),
                self.outer_momentum,
                1 / num_workers,
            )
            warn_if_unstable_late(
                largest_stable_contraction(rate, momentum, self.nesterov, share=share),
                f"outer_lr={rate} with outer_momentum={momentum} and eager updates of "
                f"{num_workers} workers",
                "Use lower values of both.",
            )
        return dataclasses.replace(self, share=1 / num_workers)

    def init(self, params: Tensor) -> State:
        """Return this worker's outer parameters, its share of the pending round, and momentum."""
        state: State = {"outer": params, "own": torch.zeros_like(params), "under_way": 0}
        state |= new_counter(self.outer_lr)
        if self.outer_momentum > 0:
            state["momentum"] = torch.zeros_like(params)
        return state

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the pseudo-gradient, outer - local."""
        return torch.sub(state["outer"], params, out=params)

    def on_send(
        self,
        message: Tensor,
        ended: tuple[Tensor | None, Tensor | None, Tensor] | None,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Take an outer step with this worker's share of this round and the others' of the last."""
        own: Tensor = state["own"]
        gradient = own
        if ended is not None:
            gradient = ended[2].sub_(own)
        torch.mul(message, self.share, out=own)
        if ended is not None:
            gradient.add_(own)
        state["under_way"] = 1
        return self._step(gradient, state)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Take the step of DiLoCo, or correct the last step if a round was pending."""
        if not state["under_way"]:
            return self._step(received, state)
        state["under_way"] = 0
        late = received.sub_(state["own"])
        rate = rate_at(self.outer_lr, max(0, state.get(ROUNDS, 0) - 1))
        if self.outer_momentum > 0:
            state["momentum"].add_(late)
            rate *= 1 + self.outer_momentum if self.nesterov else 1.0
        outer: Tensor = state["outer"]
        return outer.add_(late, alpha=-rate)

    def _step(self, gradient: Tensor, state: State) -> Tensor:
        outer: Tensor = state["outer"]
        rate, momentum = next_rate(self.outer_lr, state), self.outer_momentum
        step_outer_sgd(outer, gradient, state.get("momentum"), rate, momentum, self.nesterov)
        return outer

    def metrics(self, state: State) -> dict[str, float]:
        """Return the outer learning rate if it is a schedule."""
        return outer_lr_metrics(self.outer_lr, state)
