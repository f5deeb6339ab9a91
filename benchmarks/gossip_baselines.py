"""Baselines for gossip after every local step, written against the public contract of algorithms.

Use them with ``sync_every=1``; :mod:`gasloc_evidence` compares them with GASLoC. Rounds are
blocking, and the mean over the workers changes by the local steps only.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.compression import Codec, Int4
from lightning_loco.topology import Topology


@dataclasses.dataclass(frozen=True)
class Int4Differences(Int4):
    """``Int4`` for messages that are differences to estimates.

    Gossip refuses rough codecs because it usually sends parameters. A difference that loses
    something is corrected by the next one.
    """

    is_rough = False


@dataclasses.dataclass(frozen=True)
class ChocoSGD(Algorithm):
    r"""CHOCO-SGD, algorithm 2 of Koloskova et al., arXiv:1902.00340, on a fixed graph.

    .. math::
        q^i = Q(x^i - \hat x^i), \qquad \hat x^i \leftarrow \hat x^i + q^i, \qquad
        x^i \leftarrow x^i + \gamma \sum_j W_{ij} (\hat x^j - \hat x^i)

    where :math:`x^i` is the parameters after the local step. A worker keeps :math:`\hat x^i` and
    :math:`\sum_j W_{ij} (\hat x^j - \hat x^i)`. The estimates begin at the common start of all
    workers instead of 0, which is the same in coordinates whose origin is the start.

    Args:
        gossip_step: :math:`\gamma` in (0, 1], smaller the more the codec loses.
        codec: Q, also to be given as ``compression``; None for no compression.
    """

    gossip_step: float = 0.5
    codec: Codec | None = None

    exchange = "neighbors"
    reads = frozenset({"message"})
    start_key = "start"
    default_topology = "ring"

    @property
    def granularity(self) -> int:
        return 1 if self.codec is None else self.codec.block

    def init(self, params: Tensor) -> State:
        return {"start": params, "estimate": params.clone(), "pull": torch.zeros_like(params)}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params.sub_(state["estimate"])

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """``received`` is ``W Q(m) + m - Q(m)``, so that the pull grows by ``received - m``."""
        assert message is not None
        estimate, pull, start = state["estimate"], state["pull"], state["start"]
        pull.add_(received).sub_(message)
        torch.add(estimate, message, out=start)
        start.add_(pull, alpha=self.gossip_step)
        codec = self.codec
        estimate.add_(message if codec is None else codec.decode(codec.encode(message), received))
        return start


@dataclasses.dataclass(frozen=True)
class A2CiD2(Algorithm):
    r"""A2CiD2 of Nabli et al., arXiv:2306.08289, with one unit of time per round.

    Between two events :math:`\dot x = \eta\,(\tilde x - x)` and
    :math:`\dot{\tilde x} = \eta\,(x - \tilde x)`. Local steps move both vectors alike, and an
    exchange moves :math:`x` by :math:`-\alpha \Lambda x` and :math:`\tilde x` by
    :math:`-\tilde\alpha \Lambda x`. With random matchings these are the exchanges of the paper, at
    times that are not random; on a fixed graph all edges are averaged at once.

    Args:
        mixing_rate: :math:`\eta`. None: :math:`1 / (2 \sqrt{\chi_1 \chi_2})`.
        gossip_step: :math:`\alpha`. None: 0.5 on matchings, 1 on other graphs.
        momentum_step: :math:`\tilde\alpha`. None: :math:`\alpha \sqrt{\chi_1 / \chi_2}`.
        laplacian_scale: :math:`\Lambda = s\,(I - W)`.
    """

    mixing_rate: float | None = None
    gossip_step: float | None = None
    momentum_step: float | None = None
    laplacian_scale: float = dataclasses.field(default=1.0, metadata={"prepared": True})

    exchange = "neighbors"
    reads = frozenset({"message"})
    start_key = "start"
    default_topology = "random_matching"

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> A2CiD2:
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        chi_1, chi_2 = resistances(topology, num_workers)
        rate, alpha, step = self.mixing_rate, self.gossip_step, self.momentum_step
        if rate is None:
            rate = 1 / (2 * math.sqrt(chi_1 * chi_2))
        if alpha is None:
            alpha = 0.5 if topology.is_matching else 1.0
        if step is None:
            step = alpha * math.sqrt(chi_1 / chi_2)
        return A2CiD2(rate, alpha, step, topology.laplacian_scale)

    def init(self, params: Tensor) -> State:
        return {"start": params, "tilde": params.clone()}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Move both vectors by the local step and the exchange, then mix them for the time 1."""
        assert message is not None
        start, tilde, scale = state["start"], state["tilde"], self.laplacian_scale
        tilde.add_(message).sub_(start)
        start.copy_(message)
        apart = torch.sub(message, received, out=received)
        tilde.sub_(apart, alpha=self.momentum_step * scale)
        start.sub_(apart, alpha=self.gossip_step * scale)
        pull = torch.sub(tilde, start, out=apart).mul_(-math.expm1(-2 * self.mixing_rate) / 2)
        tilde.sub_(pull)
        return start.add_(pull)


def resistances(topology: Topology, num_workers: int) -> tuple[float, float]:
    r"""The constants of an undirected graph from definitions 3.1 and 3.2 of the paper.

    Of the mean of :math:`\Lambda` over the rounds, :math:`\chi_1` is the inverse of the smallest
    positive eigenvalue, and :math:`\chi_2` half of the largest effective resistance of an edge.
    """
    period = topology.period(num_workers)
    if period is None:  # random pairs, which are all equally likely
        mode = 1 - topology.moments(num_workers, 1.0)[0]
        return 1 / mode, 1 / mode
    mixing = torch.stack([topology.mixing_matrix(num_workers, t) for t in range(period)]).mean(0)
    laplacian = topology.laplacian_scale * (torch.eye(num_workers, dtype=mixing.dtype) - mixing)
    inverse = torch.linalg.pinv(laplacian, hermitian=True)
    ends = inverse.diagonal()
    between = ends[:, None] + ends[None, :] - 2 * inverse
    return float(torch.linalg.eigvalsh(inverse).max()), float(between[laplacian < -1e-9].max()) / 2
