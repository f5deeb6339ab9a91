"""A2CiD2: gossip whose parameters mix continuously with a second copy of them, in rounds."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, RoundInfo, State
from lightning_loco.topology import laplacian_modes, resistances

if TYPE_CHECKING:
    from lightning_loco.topology import Topology

_MAX_CHECKED_WORKERS = 1024  # the spectrum of larger graphs takes too long


@dataclasses.dataclass(frozen=True)
class A2CiD2(Algorithm):
    r"""Gossip that is accelerated by a second vector, with which the parameters mix all the time.

    Between two events of a worker, a local step or an exchange,

    .. math::
        \dot x = \eta\,(\tilde x - x), \qquad \dot{\tilde x} = \eta\,(x - \tilde x),

    whose solution after a time t is :math:`x + m (\tilde x - x)` and
    :math:`\tilde x + m (x - \tilde x)` with :math:`m = (1 - e^{-2 \eta t}) / 2`. Local steps move
    both vectors alike, and an exchange moves

    .. math::
        x \leftarrow x - \alpha \Lambda x, \qquad \tilde x \leftarrow \tilde x - \tilde\alpha
        \Lambda x

    with the Laplacian :math:`\Lambda` of the round, as in
    :class:`~lightning_loco.algorithms.GASLoC`. For a pair of workers that is
    :math:`x^i - \alpha (x^i - x^j)`. Both vectors have the same mean over the workers, which
    changes by local steps only. With :math:`\eta = 0` it is plain gossip. The method is meant for a
    round after every local step (``sync_every=1``).

    In the paper local steps and exchanges of pairs come at random times, each after its own Poisson
    clock. Here the time between two rounds is 1, local steps come right before the exchange, and
    all pairs of a round exchange at once. With random matchings an exchange is the one of the
    paper, and only the times are not random. On a fixed graph all edges of a worker are averaged at
    once with the weights of the topology, which the paper's theorem does not cover;
    :meth:`prepare` checks that it converges. Rounds are blocking.

    Args:
        mixing_rate: :math:`\eta`, not negative, per round. ``"auto"``:
            :math:`1 / (2 \sqrt{\chi_1 \chi_2})`, with :math:`1 / \chi_1` the smallest positive
            eigenvalue of the mean of :math:`\Lambda` over the rounds, and :math:`2 \chi_2` the
            largest effective resistance of an edge.
        gossip_step: :math:`\alpha`, positive. ``"auto"``: 0.5 on matchings, where pairs average, as
            in the paper; 1 on other graphs.
        momentum_step: :math:`\tilde\alpha`, positive. ``"auto"``:
            :math:`\alpha \sqrt{\chi_1 / \chi_2}`.
        laplacian_scale: :math:`\Lambda = s\,(I - W)` for the mixing matrix W; set by
            :meth:`prepare` from the topology.

    Raises:
        ValueError: If a number is out of range; from :meth:`prepare` if gossip diverges on a fixed
            graph, or if ``"auto"`` is asked for on a directed one.

    Source:
        Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in
        Decentralized Deep Learning", arXiv:2306.08289.

    Example:
        >>> import torch
        >>> algorithm = A2CiD2(mixing_rate=0.0, gossip_step=1.0)
        >>> state = algorithm.init(torch.zeros(1))
        >>> message = algorithm.propose(torch.tensor([3.0]), state, RoundInfo())
        >>> received = torch.tensor([2.0])  # the worker's row of W @ x
        >>> algorithm.update(message, received, state, RoundInfo())
        tensor([2.])
    """

    mixing_rate: float | Literal["auto"] = "auto"
    gossip_step: float | Literal["auto"] = "auto"
    momentum_step: float | Literal["auto"] = "auto"
    laplacian_scale: float = dataclasses.field(default=1.0, metadata={"prepared": True})

    exchange = "neighbors"
    start_key = "start"
    default_topology = "random_matching"

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("mixing_rate", "gossip_step", "momentum_step"):
            value, may_be_zero = getattr(self, name), name == "mixing_rate"
            if value == "auto" or (
                isinstance(value, (int, float))
                and (0 < value < math.inf or (may_be_zero and value == 0))
            ):
                continue
            sign = "not negative" if may_be_zero else "positive"
            raise ValueError(f"{name} must be {sign} and finite, or 'auto', got {value!r}.")

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> A2CiD2:
        """Resolve ``"auto"`` on this graph, and check that gossip converges if it is fixed."""
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        alpha, rate, step = self.gossip_step, self.mixing_rate, self.momentum_step
        if alpha == "auto":
            alpha = 0.5 if topology.is_matching else 1.0
        if "auto" in (rate, step):
            chi_1, chi_2 = (1.0, 1.0) if rate == 0 else resistances(topology, num_workers)
            rate = 1 / (2 * math.sqrt(chi_1 * chi_2)) if rate == "auto" else rate
            step = alpha * math.sqrt(chi_1 / chi_2) if step == "auto" else step
        ready = dataclasses.replace(
            self,
            mixing_rate=rate,
            gossip_step=alpha,
            momentum_step=step,
            laplacian_scale=topology.laplacian_scale,
        )
        is_fixed = topology.period(num_workers) == 1
        if is_fixed and 1 < num_workers <= _MAX_CHECKED_WORKERS:
            factor = ready.consensus_factor(num_workers, topology)
            if factor >= 1:
                raise ValueError(
                    f"{ready} does not reach consensus on this topology of {num_workers} workers: "
                    f"the distance grows by {factor:.3f} per round. Use a smaller gossip_step."
                )
        return ready

    def consensus_factor(self, num_workers: int, topology: Topology) -> float:
        """Return the asymptotic factor per round of the distance between workers, on a fixed graph.

        It is that of gossip without local steps, below 1 if it converges. Call it on what
        :meth:`prepare` returns.
        """
        alpha, step, mix = self._numbers
        largest = 0.0
        for mode in laplacian_modes(topology, num_workers, 0):
            if mix == 0:
                largest = max(largest, abs(1 - alpha * mode))
                continue
            jump = torch.tensor(
                [[1 - alpha * mode, 0], [-step * mode, 1]], dtype=torch.complex128, device="cpu"
            )
            flow = torch.tensor(
                [[1 - mix, mix], [mix, 1 - mix]], dtype=torch.complex128, device="cpu"
            )
            largest = max(largest, float(torch.linalg.eigvals(flow @ jump).abs().max()))
        return largest

    @property
    def _numbers(self) -> tuple[float, float, float]:
        """Alpha, its like for the second vector, and the share m that the vectors mix per round."""
        alpha, step, rate = self.gossip_step, self.momentum_step, self.mixing_rate
        step = alpha if step == "auto" and rate == 0 else step  # does not matter then
        assert alpha != "auto"
        assert step != "auto"
        assert rate != "auto"
        return alpha, step, -math.expm1(-2 * rate) / 2

    def init(self, params: Tensor) -> State:
        """Return the result of the last round, and the second vector."""
        return {"start": params, "tilde": params.clone()}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the local parameters."""
        return params

    def update(self, params: Tensor, received: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Move the second vector by the local steps, exchange, and let one unit of time pass."""
        alpha, step, mix = self._numbers
        start: Tensor = state["start"]
        tilde: Tensor = state["tilde"]
        tilde.add_(params).sub_(start)
        start.copy_(params)
        apart = torch.sub(params, received, out=received)
        tilde.sub_(apart, alpha=step * self.laplacian_scale)
        start.sub_(apart, alpha=alpha * self.laplacian_scale)
        if mix == 0:
            return start
        pull = torch.sub(tilde, start, out=apart).mul_(mix)
        tilde.sub_(pull)
        return start.add_(pull)
