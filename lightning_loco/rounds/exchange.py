"""How messages move: the mean over all workers, or the mix of one's neighbours.

Every exchange has two faces that must agree: ``start(...).wait(...)`` between processes, and
``simulate(...)`` on the list of all messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed
from lightning_loco.topology import Topology


class Handle(Protocol):
    """A message under way."""

    def wait(self, total_weight: float) -> Tensor:
        """Return what was received: valid until the next start, perhaps in the message's memory.

        Args:
            total_weight: Sum of the weights of all workers in this round.
        """


class Exchange(Protocol):
    """One way of moving messages."""

    def start(self, message: Tensor, round_index: int) -> Handle:
        """Send a flat message; it must stay untouched until :meth:`Handle.wait` has returned."""

    def normalize(self, received: Tensor, total_weight: float) -> None:
        """Turn any part of what ``wait(1.0)`` returned into what ``wait(total_weight)`` would."""

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker would receive, given all messages in order of the workers."""


class MeanExchange:
    """All-reduce: everyone receives the mean of the messages, weighted by 0 or 1 each.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
    """

    def __init__(self, group: WorkerGroup, statistics: Statistics) -> None:
        self._group = group
        self._statistics = statistics

    def start(self, message: Tensor, round_index: int) -> MeanHandle:
        """Sum the messages in place; a worker of weight 0 must send zeros."""
        work = None
        if self._group.data is not None:
            with Explained(self._group, f"round {round_index}"):
                work = dist.all_reduce(message, group=self._group.data, async_op=True)
            n = self._group.num_workers
            self._statistics.bytes_sent += 2 * (n - 1) * message.nbytes // n
        return MeanHandle(self, message, work, round_index)

    def normalize(self, received: Tensor, total_weight: float) -> None:
        """Divide the sum by the weight of all messages."""
        if total_weight != 1:
            received.div_(total_weight)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Sum in the order of the workers, then divide."""
        mean = torch.stack(list(messages)).sum(0)
        self.normalize(mean, len(messages))
        return [mean.clone() for _ in messages]


class MeanHandle:
    """An all-reduce under way."""

    def __init__(
        self, exchange: MeanExchange, message: Tensor, work: dist.Work | None, round_index: int
    ) -> None:
        self._exchange = exchange
        self._message = message
        self._work = work
        self._round_index = round_index

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def arrives_within(self, seconds: float) -> bool:
        """Wait a little; on a GPU, where the host need not wait, return False at once."""
        if self._work is None:
            return True
        if self._message.device.type != "cpu":
            return False
        try:
            with Timed(self._exchange._statistics):
                self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        self._work = None
        return True

    def wait(self, total_weight: float) -> Tensor:
        """Return the mean, in the memory of the message."""
        if self._work is not None:
            group = self._exchange._group
            with (
                Timed(self._exchange._statistics),
                Explained(group, f"round {self._round_index}"),
            ):
                self._work.wait()
            self._work = None
        self._exchange.normalize(self._message, total_weight)
        return self._message


class NeighborExchange:
    r"""Send the message to the neighbours of a topology and mix: :math:`\sum_j W_{ij} m_j`.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
        topology: Who is whose neighbour in which round, and the mixing matrix W.
    """

    def __init__(self, group: WorkerGroup, statistics: Statistics, topology: Topology) -> None:
        self._group = group
        self._statistics = statistics
        self._topology = topology
        self._spare: list[Tensor] = []

    def start(self, message: Tensor, round_index: int) -> Handle:
        """Post all sends and receives of one message."""
        group = self._group
        weights = dict(self._topology.weights(group.worker, group.num_workers, round_index))
        own_weight = weights.pop(group.worker, 0.0)
        receivers = self._topology.receivers(group.worker, group.num_workers, round_index)
        inbox = {peer: self._buffer_like(message) for peer in weights}
        operations = [dist.P2POp(dist.irecv, inbox[peer], peer, group.data) for peer in inbox] + [
            dist.P2POp(dist.isend, message, peer, group.data) for peer in receivers
        ]
        works: list[dist.Work] = []
        if operations:
            with Explained(group, f"round {round_index}"):
                works = dist.batch_isend_irecv(operations)
        self._statistics.bytes_sent += message.nbytes * len(receivers)
        return _Mix(self, message, own_weight, weights, inbox, works, round_index)

    def normalize(self, received: Tensor, total_weight: float) -> None:
        """Nothing: the mixing weights of a row sum to 1."""

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Apply the rows of the mixing matrix of this round."""
        n = len(messages)
        mixed = []
        for worker in range(n):
            weights = dict(self._topology.weights(worker, n, round_index))
            own_weight = weights.pop(worker, 0.0)
            inbox = {peer: messages[peer].clone() for peer in weights}
            mixed.append(_mix(messages[worker].clone(), own_weight, weights, inbox))
        return mixed

    def _buffer_like(self, message: Tensor) -> Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= message.numel():
                return self._spare.pop(index)[: message.numel()]
        return torch.empty_like(message)

    def _release(self, buffers: Sequence[Tensor]) -> None:
        """Take back memory for the next message."""
        self._spare.extend(b._base if b._base is not None else b for b in buffers)


class _Mix:
    def __init__(
        self,
        exchange: NeighborExchange,
        message: Tensor,
        own_weight: float,
        weights: dict[int, float],
        inbox: dict[int, Tensor],
        works: list[dist.Work],
        round_index: int,
    ) -> None:
        self._exchange = exchange
        self._message = message
        self._own_weight = own_weight
        self._weights = weights
        self._inbox = inbox
        self._works = works
        self._round_index = round_index

    def wait(self, total_weight: float) -> Tensor:
        exchange = self._exchange
        with (
            Timed(exchange._statistics),
            Explained(exchange._group, f"round {self._round_index}"),
        ):
            for work in self._works:
                work.wait()
        mixed = _mix(self._message, self._own_weight, self._weights, self._inbox)
        exchange._release(list(self._inbox.values()))
        return mixed


def _mix(
    message: Tensor, own_weight: float, weights: Mapping[int, float], inbox: Mapping[int, Tensor]
) -> Tensor:
    """Sum the weighted messages in place of the first received one."""
    if not weights:
        return message
    first, *others = weights
    mixed = inbox[first].mul_(weights[first]).add_(message, alpha=own_weight)
    for peer in others:
        mixed.add_(inbox[peer], alpha=weights[peer])
    return mixed


def make_exchange(
    algorithm: Algorithm, group: WorkerGroup, statistics: Statistics, topology: Topology | None
) -> Exchange:
    """The exchange that the algorithm names.

    Raises:
        ValueError: If the algorithm has no rounds.
    """
    if algorithm.exchange == "pull":
        raise ValueError(
            f"{type(algorithm).__name__} pulls from one peer at a time and makes no rounds. Use "
            "PairwiseEngine, or PairwiseGossipStrategy (algorithm=pairwise_gossip)."
        )
    if topology is None or algorithm.exchange == "mean":
        return MeanExchange(group, statistics)
    return NeighborExchange(group, statistics, topology)
