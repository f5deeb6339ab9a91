"""The mix of one's neighbours in a topology."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.background import begin
from lightning_loco.compression import Codec
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import ExplainErrors, PendingWork, WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.mixing import Mix, mix_all
from lightning_loco.topology import Topology

_LONGEST_JOIN_S = 5.0


class NeighborExchange:
    """Send the message to the neighbours of a topology and mix, as in :class:`Mix`."""

    is_weighted = False
    can_carry_status = False

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        topology: Topology,
        codec: Codec | None = None,
    ) -> None:
        self._group = group
        self._statistics = statistics
        self._topology = topology
        self._codec = codec
        self._spare: list[Tensor] = []

    def start(self, bucket: Bucket, round_index: int) -> NeighborHandle:
        """Post all sends and receives of one bucket; its message is not changed."""
        group, message, label = self._group, bucket.wire, f"round {round_index}"
        row = Mix.of(self._topology, group.worker, group.num_workers, round_index)
        receivers = self._topology.receivers(group.worker, group.num_workers, round_index)
        written = message if self._codec is None else self._codec.encode(message)
        memory = [self._take(written) for _ in row.others]
        inbox = {peer: m[: written.numel()] for peer, m in zip(row.others, memory, strict=True)}
        wire = written
        if receivers and self._is_staged(written):
            memory.append(self._take(written))
            wire = memory[-1][: written.numel()].copy_(written)
        operations = [dist.P2POp(dist.irecv, inbox[peer], peer, group.data) for peer in inbox] + [
            dist.P2POp(dist.isend, wire, peer, group.data) for peer in receivers
        ]
        under_way: list[dist.Work] = []
        if operations:
            with ExplainErrors(group, label):
                under_way = dist.batch_isend_irecv(operations)
        copies = len(receivers)
        self._statistics.count_compressed(written.nbytes * copies, message.nbytes * copies)
        works = PendingWork(group, label, under_way)

        def mix() -> Tensor:
            found = {peer: m.to(message.device) for peer, m in inbox.items()}
            return row.apply(message, written, found, self._codec)

        timed = WaitTimer(self._statistics, group.clock)
        give_back = functools.partial(self._spare.extend, memory)
        return NeighborHandle(works, group.wait_blocks_host, mix, timed, give_back)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Apply the rows of the mixing matrix of this round."""
        return mix_all(self._topology, messages, round_index, self._codec)

    def _take(self, message: Tensor) -> Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= message.numel():
                return self._spare.pop(index)
        if self._is_staged(message):
            pinned = torch.cuda.is_available()
            return torch.empty(message.numel(), dtype=message.dtype, pin_memory=pinned)
        return torch.empty_like(message)

    def _is_staged(self, message: Tensor) -> bool:
        """Whether messages go through the host's memory: gloo sends nothing else to one peer."""
        return self._group.wait_blocks_host and message.device.type != "cpu"


class NeighborHandle:
    """The messages of the neighbours, under way.

    Gloo can only wait for works between two processes: a thread does it, if asked to look. It
    touches no tensor.

    Args:
        works: Bring the messages.
        wait_blocks_host: Whether the backend is gloo.
        mix: Mixes them, in the thread that calls :meth:`wait`.
        timed: Counts the seconds of the wait.
        give_back: Gives the memory of what was received back.
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
            return self._works.have_ended()
        if self._coming is None:
            self._coming = begin(self._works.wait)
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
        """Give the inbox back; a thread gets a moment to end once its works have failed."""
        if self._coming is not None:
            wait([self._coming], _LONGEST_JOIN_S)
        self._give_back()
        self._mix = None
