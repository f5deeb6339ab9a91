"""CHOCO-SGD: gossip of compressed differences to estimates that all neighbours keep."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, RoundInfo, State

if TYPE_CHECKING:
    from lightning_loco.topology import Topology


class Encoder(Protocol):
    """What CHOCO-SGD uses of a codec of :mod:`lightning_loco.compression`."""

    @property
    def block(self) -> int:
        """Values in a block."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of flat values."""

    def decode(self, wire: Tensor, values: Tensor) -> Tensor:
        """Decode bytes into the memory of ``values``, and return it."""


@dataclasses.dataclass(frozen=True)
class ChocoSGD(Algorithm):
    r"""Each worker sends what is new since its last message, compressed as much as one likes.

    .. math::
        q^i = Q(x^i - \hat x^i), \qquad \hat x^i \leftarrow \hat x^i + q^i, \qquad
        x^i \leftarrow x^i + \gamma \sum_j W_{ij} (\hat x^j - \hat x^i)

    where :math:`x^i` is the parameters after the local steps. The estimate :math:`\hat x^i` of the
    parameters of worker i is known to its neighbours, because it is the sum of its messages.
    What the codec Q loses now is in the next difference, so the workers reach consensus with any
    codec if :math:`\gamma` is small enough, the sparse one included. The mean over the workers
    changes by local steps only. The codec is the ``compression`` of the strategy. Without one and
    with :math:`\gamma = 1` it is :class:`~lightning_loco.algorithms.NeighborAverage`. The method is
    meant for a round after every local step (``sync_every=1``).

    A worker keeps the two vectors :math:`\hat x^i` and
    :math:`\sum_j W_{ij} (\hat x^j - \hat x^i)`, as in the memory-efficient form of the paper,
    instead of an estimate for each neighbour. So the graph must be fixed. The paper starts with
    :math:`\hat x^i = 0`; here it is the common start of all workers, which is the same in
    coordinates whose origin is the start. Rounds are blocking. (In arXiv:1907.09356 and its code
    the average is that of the estimates before the message, so that a message may travel during
    the next local step.)

    Args:
        gossip_step: :math:`\gamma` in (0, 1]. A precise codec such as int8 allows 1. Rough ones
            need less, and diverge otherwise: try 0.3 for 4 bits, 0.02 for 1.6 % of the values.
        codec: Set by the settings of the rounds from ``compression``.

    Raises:
        ValueError: If ``gossip_step`` is out of range; from :meth:`prepare` if the graph changes.

    Source:
        Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with
        Compressed Communication", arXiv:1902.00340, algorithm 2.

    Example:
        >>> import torch
        >>> algorithm = ChocoSGD(gossip_step=0.5)
        >>> state = algorithm.init(torch.zeros(1))
        >>> message = algorithm.propose(torch.tensor([4.0]), state, RoundInfo())
        >>> received = torch.tensor([2.0])  # the worker's row of W @ messages
        >>> algorithm.update(message, received, state, RoundInfo())
        tensor([3.])
    """

    gossip_step: float = 0.5
    codec: Encoder | None = dataclasses.field(default=None, metadata={"prepared": True})

    exchange = "neighbors"
    start_key = "start"
    default_topology = "ring"
    estimates_neighbors = True

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 < self.gossip_step <= 1:
            raise ValueError(
                f"gossip_step must be in (0, 1], got {self.gossip_step}. Use 1 without "
                "compression, and less the more a codec loses."
            )

    @property
    def granularity(self) -> int:
        """Length of the codec's blocks; 1 without a codec."""
        return 1 if self.codec is None else self.codec.block

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> ChocoSGD:
        """Check that the graph is fixed, and that averaging on it reaches all workers."""
        super().prepare(num_workers, topology, is_late=is_late)
        assert topology is not None
        topology.check(num_workers)
        if topology.period(num_workers) != 1:
            raise ValueError(
                f"ChocoSGD needs the same neighbours in all rounds, and topology '{topology.name}' "
                f"of {num_workers} workers changes. Use a fixed graph such as topology='ring'."
            )
        return self

    def init(self, params: Tensor) -> State:
        """Return the result of the last round, the own estimate, and the pull of the others'."""
        return {
            "start": params,
            "estimate": params.clone(),
            "pull": torch.zeros_like(params),
        }

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the difference to the estimate, which the exchange encodes."""
        return params.sub_(state["estimate"])

    def update(self, params: Tensor, received: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Bring the estimates up to date and move towards those of the neighbours.

        What is received contains the own message without loss (``received = W Q(m) + m - Q(m)``),
        so ``received - m`` is what the sum of the differences of estimates grows by.
        """
        estimate: Tensor = state["estimate"]
        pull: Tensor = state["pull"]
        start: Tensor = state["start"]
        pull.add_(received).sub_(params)
        torch.add(estimate, params, out=start)
        start.add_(pull, alpha=self.gossip_step)
        codec = self.codec
        estimate.add_(params if codec is None else codec.decode(codec.encode(params), received))
        return start
