"""The mix of one's neighbours in a topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.background import BackgroundThread
from lightning_loco.codecs import Codec
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed, Works
from lightning_loco.rounds.compressed_mixing import mix_all_compressed, mix_compressed
from lightning_loco.rounds.mixing import Mix, mix_all
from lightning_loco.rounds.parcels import Parcel
from lightning_loco.topology import Topology

_LONGEST_JOIN_S = 5.0


class NeighborExchange:
    r"""Send the message to the neighbours of a topology and mix: :math:`\sum_j W_{ij} m_j`.

    With a codec, :func:`~lightning_loco.rounds.compressed_mixing.mix_compressed` mixes.
    """

    is_weighted = False
    can_carry_rows = False

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

    def start(self, parcel: Parcel, round_index: int) -> NeighborHandle:
        """Post all sends and receives of one parcel; its message is not changed."""
        group, message, place = self._group, parcel.wire, f"round {round_index}"
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
            with Explained(group, place):
                under_way = dist.batch_isend_irecv(operations)
        copies = len(receivers)
        self._statistics.count_compressed(written.nbytes * copies, message.nbytes * copies)
        works = Works(group, place, under_way)

        def mix() -> Tensor:
            found = {peer: m.to(message.device) for peer, m in inbox.items()}
            if self._codec is None:
                return row.apply(message, found)
            return mix_compressed(self._codec, row, message, written, found)

        arrival = _Arrival(works) if group.host_waits else works
        timed = Timed(self._statistics, group.clock)
        return NeighborHandle(arrival, mix, timed, lambda: self._spare.extend(memory))

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Apply the rows of the mixing matrix of this round."""
        if self._codec is not None:
            return mix_all_compressed(self._codec, self._topology, messages, round_index)
        return mix_all(self._topology, messages, round_index)

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
        return self._group.host_waits and message.device.type != "cpu"


class _Arrival:
    """Works between two processes, which gloo can only wait for: a thread does, if asked to look.

    The thread touches no tensor. It begins with the first question.
    """

    def __init__(self, works: Works) -> None:
        self._works = works
        self._thread: BackgroundThread | None = None
        self._error: RuntimeError | None = None

    def have_ended(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never waits."""
        if self._thread is None:
            self._thread = BackgroundThread("loco-arrival", self._run)
            self._thread.start()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._works.wait()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        """Wait for their end; raises RuntimeError if one has failed."""
        if self._thread is None:
            self._works.wait()
            return
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Give the thread a moment to end, once its works have failed or ended."""
        if self._thread is not None:
            self._thread.join(_LONGEST_JOIN_S)


class NeighborHandle:
    """The messages of the neighbours, under way.

    ``works`` bring them, ``mix`` mixes them, in the thread that calls :meth:`wait`, which ``timed``
    counts, and ``give_back`` gives the memory of what was received back.
    """

    lost = None

    def __init__(
        self,
        works: Works | _Arrival,
        mix: Callable[[], Tensor],
        timed: Timed,
        give_back: Callable[[], None],
    ) -> None:
        self._works = works
        self._mix: Callable[[], Tensor] | None = mix
        self._timed = timed
        self._give_back = give_back

    def has_arrived(self) -> bool:
        """Whether the messages are there; never waits."""
        return self._works.have_ended()

    def wait(self) -> Tensor:
        """Return the mix, or the message itself for a worker without neighbours."""
        with self._timed:
            self._works.wait()
        mix, self._mix = self._mix, None
        assert mix is not None
        return mix()

    def release(self) -> None:
        """Give the inbox back; its messages have failed or arrived."""
        if isinstance(self._works, _Arrival):
            self._works.end()
        self._give_back()
        self._mix = None
