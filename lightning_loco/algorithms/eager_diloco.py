"""Eager DiLoCo: a worker does not wait for its own part of the mean."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, State
from lightning_loco.algorithms.diloco import check_outer_sgd, step_outer_sgd
from lightning_loco.algorithms.merge import Restart
from lightning_loco.algorithms.outer_lr import (
    ROUNDS,
    OuterLR,
    highest_rate,
    new_counter,
    next_rate,
    outer_lr_metrics,
    rate_at,
)
from lightning_loco.algorithms.stability import largest_stable_contraction

if TYPE_CHECKING:
    from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class EagerDiLoCo(Algorithm):
    r"""DiLoCo one round late, but for the worker's own share, which is as new as can be.

    At the end of round t a worker has its own pseudo-gradient of that round and the mean of the
    round before. It makes an outer step with

    .. math::
        \tilde\Delta^i_t = \tfrac{1}{N} \Delta^i_t
        + \big(\bar\Delta_{t-1} - \tfrac{1}{N} \Delta^i_{t-1}\big)

    on outer parameters of its own, as :class:`~lightning_loco.algorithms.DiLoCo` does with the
    mean. The corrections telescope: all of every worker's progress is applied everywhere, and the
    copies stay a bounded distance apart. The consensus model is their mean. Without overlap, and in
    a first round of a warm start, all is known at once, and it is DiLoCo; so it is with one worker.

    When the last result lands and no message leaves, the last step is made up for: momentum and
    outer parameters become what they would be, had the mean been known then.

    Args:
        outer_lr: Outer learning rate, positive; or a schedule, from the number of an outer step to
            its rate.
        outer_momentum: Momentum in [0, 1).
        nesterov: Nesterov momentum as in ``torch.optim.SGD``; False is heavy ball.
        share: What a worker does not wait for, 1/N; set by :meth:`prepare`.

    Raises:
        ValueError: If a number is out of range.

    Source:
        Kale, Douillard, Donchev, "Eager Updates For Overlapped Communication and Computation in
        DiLoCo", arXiv:2502.12996.

    Example:
        >>> algorithm = EagerDiLoCo(outer_lr=1.0, outer_momentum=0.0, share=0.5)
        >>> state = algorithm.init(torch.zeros(1))
        >>> algorithm.on_send(torch.tensor([-2.0]), None, state)  # half of its own progress
        tensor([1.])
        >>> mean = torch.tensor([-3.0])  # of the two workers
        >>> algorithm.on_send(torch.tensor([0.0]), (mean, mean), state)  # the rest, theirs
        tensor([3.])
    """

    outer_lr: OuterLR = 0.7
    outer_momentum: float = 0.0
    nesterov: bool = True
    share: float = dataclasses.field(default=1.0, metadata={"prepared": True})

    exchange = "mean"
    merge_policy = Restart()

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_outer_sgd(self.outer_lr, self.outer_momentum)

    def prepare(self, num_workers: int, topology: Topology | None) -> EagerDiLoCo:
        """Refuse a topology, and learn the share of a worker."""
        super().prepare(num_workers, topology)
        return dataclasses.replace(self, share=1 / num_workers)

    def warn_overlap(self) -> None:
        """Warn when (outer_lr, outer_momentum) is unstable one round late."""
        rate, momentum = highest_rate(self.outer_lr), self.outer_momentum
        limit = largest_stable_contraction(rate, momentum, self.nesterov, share=self.share)
        if limit < 1 - 1e-6:
            warnings.warn(
                f"outer_lr={rate} with outer_momentum={momentum} and eager updates of "
                f"{1 / self.share:.0f} workers is unstable when a local phase covers more than "
                f"{limit:.0%} of the way to its optimum. Use less of both.",
                stacklevel=2,
            )

    def init(self, params: Tensor) -> State:
        """Outer parameters of this worker, momentum, and its share of the round under way."""
        state: State = {"outer": params, "own": torch.zeros_like(params), "under_way": 0}
        state |= new_counter(self.outer_lr)
        if self.outer_momentum > 0:
            state["momentum"] = torch.zeros_like(params)
        return state

    def propose(self, params: Tensor, state: State) -> Tensor:
        """The message is the pseudo-gradient, outer - local."""
        return torch.sub(state["outer"], params, out=params)

    def on_send(self, message: Tensor, ended: tuple[Tensor, Tensor] | None, state: State) -> Tensor:
        """An outer step with the own share of what leaves, and what came late of the others."""
        own: Tensor = state["own"]
        gradient = own
        if ended is not None:
            gradient = ended[1].sub_(own)
        torch.mul(message, self.share, out=own)
        if ended is not None:
            gradient.add_(own)
        state["under_way"] = 1
        return self._step(gradient, state)

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """The step of DiLoCo; or what the last step lacked, if a round was under way."""
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

    def restart(self, state: State) -> Tensor:
        """The round begins at this worker's outer parameters."""
        outer: Tensor = state["outer"]
        return outer

    def metrics(self, state: State) -> dict[str, float]:
        """The outer learning rate, if it changes."""
        return outer_lr_metrics(self.outer_lr, state)

    def outer_gradient(self, params: Tensor, received: Tensor, state: State) -> Tensor | None:
        """The mean pseudo-gradient."""
        return received
