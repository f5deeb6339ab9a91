"""NoLoCo: DiLoCo's outer momentum without an all-reduce, by gossip in small groups."""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.algorithms.merge_policy import KeepProgress
from lightning_loco.topology import Topology, gossip_radius

_MAX_CHECKED_WORKERS = 1024  # the spectrum of larger graphs takes too long


@dataclasses.dataclass(frozen=True)
class NoLoCo(Algorithm):
    r"""Each worker has its own outer parameters and momentum, and exchanges with a few others.

    .. math::
        u^i = \phi^i + \tfrac{\beta}{\gamma}(\theta^i - \phi^i), \qquad
        \delta^i \leftarrow a\,\delta^i + \gamma\,\Big(\sum_j W_{ij} u^j - \phi^i\Big), \qquad
        \phi^i \leftarrow \phi^i + \delta^i, \qquad \theta^i \leftarrow \phi^i

    with the mixing matrix W of the round's topology, a random pairing of the workers by default.
    The paper averages drifts and outer parameters in two sums. With the same W for both they are
    one message, which for :math:`\gamma = \beta` is the local parameters. On a
    complete graph this is DiLoCo with heavy-ball momentum, and with :math:`a = 0, \gamma = 1` it is
    GASLoC without momentum. The consensus model is the mean over the workers.

    Args:
        outer_momentum: :math:`a` in [0, 1).
        outer_lr: :math:`\beta`, positive.
        gossip_step: :math:`\gamma`, positive: the step towards the mean of the group. Default:
            ``outer_lr``.

    Raises:
        ValueError: If a number is out of range; from :meth:`prepare` if gossip alone diverges.

    Source:
        Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
        Models", arXiv:2506.10911, and its published code.

    Example:
        >>> algorithm = NoLoCo(outer_momentum=0.0, outer_lr=1.0)
        >>> state = algorithm.init(torch.zeros(1))
        >>> local = torch.tensor([3.0])
        >>> message = algorithm.propose(local, state, RoundInfo())
        >>> received = torch.tensor([2.0])  # the worker's row of W @ u
        >>> algorithm.update(None, None, received, state, RoundInfo())
        tensor([2.])
    """

    outer_momentum: float = 0.5
    outer_lr: float = 0.7
    gossip_step: float | None = None

    exchange = "neighbors"
    start_key = "start"
    default_topology = "random_matching"
    merge_policy = KeepProgress()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum must be in [0, 1), got {self.outer_momentum}. 0.5 is common."
            )
        for name in ("outer_lr", "gossip_step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}. A common value is 0.7.")

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> NoLoCo:
        """Check that gossip without local steps brings the workers together on this graph."""
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        if 1 < num_workers <= _MAX_CHECKED_WORKERS:
            self._check_stable(num_workers, topology)
        return self

    def _check_stable(self, num_workers: int, topology: Topology) -> None:
        step = self._gossip_step / topology.laplacian_scale
        radius = gossip_radius(topology, num_workers, step, self.outer_momentum)
        if radius < 1:
            return
        text = (
            f"gossip_step={self._gossip_step:g} with outer_momentum={self.outer_momentum:g} makes "
            f"gossip of {num_workers} workers diverge: the distance grows by {radius:.3f} per "
            "round. Use lower values of both; 0.7 with 0.5 suits random pairs."
        )
        if topology.period(num_workers) is not None:
            raise ValueError(text)
        warnings.warn(text, stacklevel=4)

    @property
    def _gossip_step(self) -> float:
        return self.outer_lr if self.gossip_step is None else self.gossip_step

    def init(self, params: Tensor) -> State:
        """Return this worker's outer parameters, and a momentum buffer with momentum."""
        state = {"start": params}
        if self.outer_momentum > 0:
            state["momentum"] = torch.zeros_like(params)
        return state

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return u, which is the local parameters if both step sizes are equal."""
        if self._gossip_step == self.outer_lr:
            return params
        return torch.lerp(state["start"], params, self.outer_lr / self._gossip_step, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Take an outer step with momentum towards the mean of the group."""
        start: Tensor = state["start"]
        if self.outer_momentum == 0:
            return torch.lerp(start, received, self._gossip_step, out=start)
        momentum: Tensor = state["momentum"]
        pull = torch.sub(received, start, out=received)
        momentum.mul_(self.outer_momentum).add_(pull, alpha=self._gossip_step)
        return start.add_(momentum)
