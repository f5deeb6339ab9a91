"""GASLoC: local updates, gossip with neighbours, and one momentum for both."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.algorithms.merge_policy import KeepProgress
from lightning_loco.algorithms.outer_lr import (
    ROUNDS,
    OuterLR,
    check_outer_lr,
    new_counter,
    next_rate,
    outer_lr_metrics,
    rate_at,
)
from lightning_loco.topology import Topology, gossip_radius, lambda_max

_AUTO_MOMENTA = {"local": (0.5, 0.3, 0.1), "gossiped": (0.7, 0.5, 0.3, 0.1)}
_SLOWEST_CONSENSUS = 0.85
"""With ``momentum="auto"`` on ``"gossiped"``: the largest factor per round of the distance between
workers."""
_MAX_CHECKED_WORKERS = 1024  # the spectrum of larger graphs takes too long


@dataclasses.dataclass(frozen=True)
class GASLoC(Algorithm):
    r"""Each worker moves along its own drift and towards its neighbours, with momentum.

    .. math::
        u_t = \theta_t + \eta\,g_t, \qquad z_t = u_t - \alpha \Lambda u_t, \qquad
        \theta_{t+1} = z_t + \gamma\,(z_t - z_{t-1}), \qquad z_{-1} = \theta_0

    with the drift :math:`g_t = \theta_{t,H_i} - \theta_t` of the local steps and the Laplacian
    :math:`\Lambda` of the topology, :math:`\Lambda_{ii} = \sum_j \lambda_{ij}` over undirected
    edges. With Metropolis weights a ``gossip_step`` of 1 is one step of Metropolis gossip; a pair
    of workers averages at 0.5. Messages go to neighbours only. The consensus model is the mean.

    With overlap the recursion is the same, and the drift :math:`g_{t+1}` comes from the local steps
    taken while the exchange of :math:`u_t` was pending, from parameters without its result.

    Args:
        outer_lr: :math:`\eta`, positive; 1 takes the local parameters as they are. Or a schedule,
            from the index of a round to its rate. With momentum and a schedule it is not DiLoCo on
            a complete graph, because :math:`u_{t-1}` contains the previous rate.
        gossip_step: :math:`\alpha`, positive. ``"auto"``: 1 on fixed graphs, 0.5 on matchings: one
            step of the mixing matrix. :func:`lightning_loco.topology.optimal_gossip` gives the pair
            :math:`(\alpha^*, \gamma^*)` that reaches consensus fastest.
        momentum: :math:`\gamma` in [0, 1). ``"auto"``: 0.7, or less if gossip would leave more than
            0.85 of the distance between workers per round. With ``"local"`` 0.5 on fixed graphs, or
            less if that would slow consensus down; 0 on changing graphs.
        momentum_on: ``"gossiped"``: as written above; on a complete graph it is DiLoCo with
            Nesterov momentum on every worker. ``"local"``, the form of the paper: the momentum
            :math:`\gamma\,(u_t - u_{t-1})` of what the worker itself has proposed, with
            :math:`u_{-1} = \theta_0`.
        laplacian_scale: :math:`\Lambda = s\,(I - W)` for the mixing matrix W; set by
            :meth:`prepare` from the topology.

    Raises:
        ValueError: If a number is out of range; from :meth:`prepare` if alpha is not stable.

    Source:
        Cagnasso, Belilovsky, Oyallon, "Unifying Local Communications and Local Updates for LLM
        Pretraining", arXiv:2606.11081.

    Example:
        >>> import torch
        >>> algorithm = GASLoC(outer_lr=1.0, gossip_step=1.0, momentum=0.0)
        >>> state = algorithm.init(torch.zeros(1))
        >>> local = torch.tensor([3.0])
        >>> message = algorithm.propose(local, state, RoundInfo())
        >>> received = torch.tensor([2.0])  # the worker's row of W @ u
        >>> algorithm.update(None, message, received, state, RoundInfo())
        tensor([2.])
    """

    outer_lr: OuterLR = 0.7
    gossip_step: float | Literal["auto"] = "auto"
    momentum: float | Literal["auto"] = "auto"
    momentum_on: Literal["local", "gossiped"] = "gossiped"
    laplacian_scale: float = dataclasses.field(default=1.0, metadata={"prepared": True})

    exchange = "neighbors"
    reads = frozenset({"message"})
    start_key = "start"
    default_topology = "ring"
    merge_policy = KeepProgress()

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_outer_lr(self.outer_lr)
        if self.gossip_step != "auto" and not _is_number_in(self.gossip_step, 0, math.inf):
            raise ValueError(
                f"gossip_step must be positive or 'auto', got {self.gossip_step!r}. "
                "1.0 is one step of gossip on a fixed graph, 0.5 averages pairs."
            )
        if self.momentum != "auto" and not (
            self.momentum == 0 or _is_number_in(self.momentum, 0, 1)
        ):
            raise ValueError(f"momentum must be in [0, 1) or 'auto', got {self.momentum!r}.")
        if self.momentum_on not in ("local", "gossiped"):
            raise ValueError(
                f"momentum_on must be 'local' or 'gossiped', got {self.momentum_on!r}."
            )

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> GASLoC:
        """Resolve ``"auto"`` on this graph and check that plain gossip is stable on it."""
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        gossip_step = self.gossip_step
        if gossip_step == "auto":
            gossip_step = 1 / topology.laplacian_scale
        momentum = self.momentum
        if momentum == "auto":
            momentum = self._auto_momentum(num_workers, topology, gossip_step)
        ready = dataclasses.replace(
            self,
            gossip_step=gossip_step,
            momentum=momentum,
            laplacian_scale=topology.laplacian_scale,
        )
        if 1 < num_workers <= _MAX_CHECKED_WORKERS:
            ready._check_stable(num_workers, topology, gossip_step, momentum)  # noqa: SLF001
        return ready

    def _auto_momentum(self, num_workers: int, topology: Topology, gossip_step: float) -> float:
        """Return the largest of a few values that does not slow consensus down much.

        With momentum gamma the consensus distance cannot shrink faster than by sqrt(gamma) per
        round. On ``"local"`` a value is accepted if gossip is that fast, or as fast as without
        momentum.
        """
        momenta, period = _AUTO_MOMENTA[self.momentum_on], topology.period(num_workers)
        if period != 1 and self.momentum_on == "local":
            return 0.0
        if not 1 < num_workers <= _MAX_CHECKED_WORKERS // (period or 1):
            return momenta[0] if period == 1 else 0.0

        def radius(momentum: float) -> float:
            return gossip_radius(topology, num_workers, gossip_step, momentum, self.momentum_on)

        plain = radius(0.0)
        for momentum in momenta:
            slowest = math.sqrt(momentum) if self.momentum_on == "local" else _SLOWEST_CONSENSUS
            if radius(momentum) <= max(plain, slowest) + 1e-9:
                return momentum
        return 0.0

    def _check_stable(
        self, num_workers: int, topology: Topology, gossip_step: float, momentum: float
    ) -> None:
        """Check that gossip without local steps reduces the distance between the workers."""
        radius = gossip_radius(topology, num_workers, gossip_step, momentum, self.momentum_on)
        if radius < 1:
            return
        setting = f"gossip_step={gossip_step:g} with momentum={momentum:g}"
        if topology.period(num_workers) is None:
            other_form = "momentum_on='gossiped' " if self.momentum_on == "local" else ""
            warnings.warn(
                f"{setting} on random pairs of {num_workers} workers is not mean-square stable "
                f"(the distance grows by {radius:.3f} per round): the workers drift apart. Use "
                f"momentum=0, {other_form}or a smaller gossip_step.",
                stacklevel=4,
            )
            return
        limit = 2 * (1 + momentum) if self.momentum_on == "local" else 1 + 1 / (1 + 2 * momentum)
        largest = lambda_max(topology, num_workers)
        raise ValueError(
            f"{setting} makes gossip on this topology of {num_workers} workers diverge: the "
            f"distance grows by {radius:.3f} per round. On a fixed graph gossip_step * lambda_max "
            f"must be below {limit:g}, and lambda_max is {largest:.4g}; "
            "graphs that change need less momentum. Use gossip_step='auto' and momentum='auto'."
        )

    def init(self, params: Tensor) -> State:
        """Return the start of the round; the previous u (or z) with momentum; a counter."""
        state: State = {"start": params, **new_counter(self.outer_lr)}
        if self.momentum != 0:
            state["previous"] = params.clone()
        return state

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return u: the start plus eta times the drift."""
        rate = rate_at(self.outer_lr, state.get(ROUNDS, 0))
        return torch.lerp(state["start"], params, rate, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Average with the neighbours and add momentum; the result starts the next round."""
        assert isinstance(self.gossip_step, (int, float))
        assert isinstance(self.momentum, (int, float))
        assert message is not None
        next_rate(self.outer_lr, state)
        start: Tensor = state["start"]
        pull = self.gossip_step * self.laplacian_scale
        if self.momentum == 0:
            return torch.lerp(message, received, pull, out=start)
        gossiped = torch.lerp(message, received, pull, out=received)
        previous = state["previous"]
        point = message if self.momentum_on == "local" else gossiped
        torch.sub(point, previous, out=start)
        previous.copy_(point)
        return torch.add(gossiped, start, alpha=self.momentum, out=start)

    def metrics(self, state: State) -> dict[str, float]:
        """Return eta if it is a schedule."""
        return outer_lr_metrics(self.outer_lr, state)


def _is_number_in(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and low < value < high
