r"""Gossip: every worker mixes its message with those of its neighbours in a topology.

.. math:: r_i = \sum_j W_{ij} u_j

With compressed messages the mean over all workers stays exact:

.. math:: r_i = \sum_j W_{ij} Q(u_j) + (u_i - Q(u_i))

Each worker adds the loss of its own message, so the mean loses nothing and no residual is needed.
Messages with the same encoding mix no further, so workers stay apart by up to the coding error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.background import run_in_thread
from lightning_loco.compression import Codec
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import PendingWork, WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.exchange import SeparateStatuses
from lightning_loco.topology import Topology

_LONGEST_JOIN_S = 5.0


class NeighborExchange(SeparateStatuses):
    """Send the message to the neighbours of a topology and mix, as in :class:`MixingRow`."""

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        topology: Topology,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(group, statistics)
        self._topology = topology
        self._codec = codec
        self._spare: list[Tensor] = []

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> NeighborHandle:
        """Post all sends and receives of one bucket; its message is not changed."""
        group, message, label = self._group, bucket.wire, f"round {round_index}"
        row = MixingRow.of(self._topology, group.worker, group.num_workers, round_index)
        receivers = self._topology.receivers(group.worker, group.num_workers, round_index)
        encoded = message if self._codec is None else self._codec.encode(message)
        memory = [self._take(encoded) for _ in row.others]
        received = {peer: m[: encoded.numel()] for peer, m in zip(row.others, memory, strict=True)}
        wire = encoded
        if receivers and self._is_staged(encoded):
            memory.append(self._take(encoded))
            wire = memory[-1][: encoded.numel()].copy_(encoded)
        operations = [
            dist.P2POp(dist.irecv, received[peer], group.ranks[peer], group.data)
            for peer in received
        ] + [dist.P2POp(dist.isend, wire, group.ranks[peer], group.data) for peer in receivers]
        works: list[dist.Work] = []
        if operations:
            with ExplainErrors(group, label):
                works = dist.batch_isend_irecv(operations)
        copies = len(receivers)
        self._statistics.count_compressed(encoded.nbytes * copies, message.nbytes * copies)
        pending = PendingWork(group, label, works)

        def mix() -> Tensor:
            found = {peer: m.to(message.device) for peer, m in received.items()}
            return row.apply(message, encoded, found, self._codec)

        timed = WaitTimer(self._statistics, group.clock)
        give_back = functools.partial(self._spare.extend, memory)
        return NeighborHandle(pending, group.wait_blocks_host, mix, timed, give_back)

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Apply the rows of the mixing matrix of this round."""
        num_workers, by_worker = len(messages), dict(enumerate(messages))
        return [
            self.simulate_worker(worker, num_workers, by_worker, round_index)
            for worker in range(num_workers)
        ]

    def simulate_worker(
        self, worker: int, num_workers: int, messages: Mapping[int, Tensor], round_index: int
    ) -> Tensor:
        """Apply one row of the mixing matrix to the ``messages`` of its :meth:`senders`."""
        row, codec = MixingRow.of(self._topology, worker, num_workers, round_index), self._codec
        own = messages[worker].clone()
        received = {
            peer: messages[peer].clone() if codec is None else codec.encode(messages[peer])
            for peer in row.others
        }
        return row.apply(own, own if codec is None else codec.encode(own), received, codec)

    def senders(self, worker: int, num_workers: int, round_index: int) -> list[int]:
        """The workers whose messages a worker needs in a round, itself included."""
        row = MixingRow.of(self._topology, worker, num_workers, round_index)
        return [worker, *row.others]

    def receivers(self, worker: int, num_workers: int, round_index: int) -> list[int]:
        """The workers that need the message of a worker in a round, itself included."""
        return [worker, *self._topology.receivers(worker, num_workers, round_index)]

    def _take(self, message: Tensor) -> Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= message.numel():
                return self._spare.pop(index)
        if self._is_staged(message):
            pinned = torch.cuda.is_available()
            return torch.empty(
                message.numel(), dtype=message.dtype, pin_memory=pinned, device="cpu"
            )
        return torch.empty_like(message)

    def _is_staged(self, message: Tensor) -> bool:
        """Whether messages go through the host's memory: gloo sends nothing else to one peer."""
        return self._group.wait_blocks_host and message.device.type != "cpu"


class NeighborHandle:
    """The messages of the neighbours, which are being received.

    Gloo does not report whether point-to-point works have completed: :meth:`has_arrived` has a
    thread wait for them. It touches no tensor.

    Args:
        works: Of the sends and receives.
        wait_blocks_host: Whether the backend is gloo.
        mix: Mixes the messages, in the thread that calls :meth:`wait`.
        timed: Counts the seconds of the wait.
        give_back: Gives the memory of received messages back.
    """

    lost = None

    def __init__(
        self,
        works: PendingWork,
        wait_blocks_host: bool,
        mix: Callable[[], Tensor],
        timed: WaitTimer,
        give_back: Callable[[], None],
    ) -> None:
        self._works = works
        self._host_waits = wait_blocks_host
        self._coming: Future[None] | None = None
        self._mix: Callable[[], Tensor] | None = mix
        self._timed = timed
        self._give_back = give_back

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never waits."""
        if not self._host_waits:
            return self._works.is_completed()
        if self._coming is None:
            # The mix is left to the caller of wait: the thread would compete with local steps.
            self._coming = run_in_thread(self._works.wait)
        return self._coming.done()

    def wait(self) -> Tensor:
        """Return the mix, or the message itself for a worker without neighbours."""
        with self._timed:
            if self._coming is None:
                self._works.wait()
            else:
                self._coming.result()
        mix, self._mix = self._mix, None
        assert mix is not None
        return mix()

    def release(self) -> None:
        """Give the memory back; a thread gets a moment to end once its works have failed."""
        if self._coming is not None:
            wait([self._coming], _LONGEST_JOIN_S)
        self._give_back()
        self._mix = None


class MixingRow(NamedTuple):
    """One worker's row of a round's mixing matrix.

    Attributes:
        own: Weight of its own message.
        others: Weights of the messages that it receives, in the order in which they are added up.

    Example:
        >>> from lightning_loco.topology import Complete
        >>> MixingRow.of(Complete(), worker=1, num_workers=2, round_index=0)
        MixingRow(own=0.5, others={0: 0.5})
    """

    own: float
    others: dict[int, float]

    @classmethod
    def of(cls, topology: Topology, worker: int, num_workers: int, round_index: int) -> MixingRow:
        """The row of a worker."""
        others = dict(topology.weights(worker, num_workers, round_index))
        return cls(others.pop(worker, 0.0), others)

    def apply(
        self,
        message: Tensor,
        encoded: Tensor,
        received: Mapping[int, Tensor],
        codec: Codec | None = None,
    ) -> Tensor:
        """Sum the weighted messages; without a codec, in the memory of the first one received.

        Args:
            message: This worker's own; only read. It is the result if there are no others.
            encoded: The same, encoded.
            received: The messages of the others, encoded.
            codec: How messages are encoded. Default: not at all.
        """
        if not self.others:
            return message
        if codec is None:
            first, *rest = self.others
            mixed = received[first].mul_(self.others[first]).add_(message, alpha=self.own)
            for peer in rest:
                mixed.add_(received[peer], alpha=self.others[peer])
            return mixed
        mixed = torch.empty_like(message)
        for part, piece in codec.pieces(mixed):
            own, read = mixed[part], torch.empty_like(mixed[part])
            codec.decode(encoded[piece], own)
            # W_ii Q(u) + (u - Q(u)): what the own encoding has lost stays with this worker.
            own.mul_(self.own - 1).add_(message[part])
            for peer, weight in self.others.items():
                own.add_(codec.decode(received[peer][piece], read), alpha=weight)
        return mixed
