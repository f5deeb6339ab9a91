"""The mix of one's neighbours in a topology."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed
from lightning_loco.rounds.parcels import Parcel
from lightning_loco.topology import Topology

_LONGEST_JOIN_S = 5.0


class NeighborExchange:
    r"""Send the message to the neighbours of a topology and mix: :math:`\sum_j W_{ij} m_j`."""

    is_weighted = False
    can_carry_rows = False

    def __init__(self, group: WorkerGroup, statistics: Statistics, topology: Topology) -> None:
        self._group = group
        self._statistics = statistics
        self._topology = topology
        self._spare: list[Tensor] = []

    def start(self, parcel: Parcel, round_index: int) -> NeighborHandle:
        """Post all sends and receives of one parcel; its message is not changed."""
        group, message, place = self._group, parcel.wire, f"round {round_index}"
        weights = dict(self._topology.weights(group.worker, group.num_workers, round_index))
        own_weight = weights.pop(group.worker, 0.0)
        receivers = self._topology.receivers(group.worker, group.num_workers, round_index)
        memory = [self._take(message) for _ in weights]
        inbox = {peer: m[: message.numel()] for peer, m in zip(weights, memory, strict=True)}
        operations = [dist.P2POp(dist.irecv, inbox[peer], peer, group.data) for peer in inbox] + [
            dist.P2POp(dist.isend, message, peer, group.data) for peer in receivers
        ]
        works: list[dist.Work] = []
        if operations:
            with Explained(group, place):
                works = dist.batch_isend_irecv(operations)
        self._statistics.bytes_sent += message.nbytes * len(receivers)

        def mix() -> Tensor:
            with Explained(group, place):
                for work in works:
                    work.wait()
            return _mix(message, own_weight, weights, inbox)

        return NeighborHandle(mix, self._statistics, lambda: self._spare.extend(memory))

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

    def _take(self, message: Tensor) -> Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= message.numel():
                return self._spare.pop(index)
        return torch.empty_like(message)


class NeighborHandle:
    """The messages of the neighbours, under way.

    ``mix`` waits for them and mixes; ``give_back`` gives the memory of what was received back.
    """

    def __init__(
        self, mix: Callable[[], Tensor], statistics: Statistics, give_back: Callable[[], None]
    ) -> None:
        self._mix: Callable[[], Tensor] | None = mix
        self._statistics = statistics
        self._give_back = give_back
        self._thread: threading.Thread | None = None
        self._outcome: Tensor | RuntimeError | None = None

    def has_arrived(self) -> bool:
        """Whether the mix is there; from the first question on a thread waits for it.

        Messages between two processes can only be waited for, not looked after.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loco-arrival", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def _run(self) -> None:
        assert self._mix is not None
        try:
            self._outcome = self._mix()
        except RuntimeError as error:
            self._outcome = error
        self._mix = None

    def wait(self) -> Tensor:
        """Return the mix, or the message itself for a worker without neighbours."""
        with Timed(self._statistics):
            if self._thread is not None:
                self._thread.join()
            else:
                self._run()
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, RuntimeError):
            raise outcome
        assert outcome is not None
        return outcome

    def release(self) -> None:
        """Give the inbox back, once the thread has ended; its messages have failed or arrived."""
        if self._thread is not None:
            self._thread.join(_LONGEST_JOIN_S)
        self._give_back()
        self._mix = self._outcome = None


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
