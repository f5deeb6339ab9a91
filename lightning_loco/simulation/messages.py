"""The messages of simulated workers: all are in the memory of one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_loco._util.clock import Clock
from lightning_loco._util.codecs import Encoding
from lightning_loco.compression import Compression
from lightning_loco.costs import LinkQueue, LinkTimes, TransferTime, TransferTimes
from lightning_loco.costs.method_costs import ExchangeKind, Traffic
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.engine.buckets import Bucket, group_chunks
from lightning_loco.engine.exchanges.exchange import Exchange, SeparateStatuses
from lightning_loco.engine.exchanges.gather import Gather
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.simulation.timeline import Timeline
from lightning_loco.topology import Topology

_NO_TIME = TransferTime(0.0, 0.0)


class Hub:
    """Collects the messages and the statuses of all workers, and returns the exchange's results.

    Here the whole message of a worker in a round is one bucket. The exchange is applied to the
    buckets that processes would send, so that the numbers are the same. A result arrives once all
    its senders have sent, the worker's link is free, and the transfer time has passed. Statuses
    take no time.

    With ``admit``, workers come and go, and the exchange is a mean. A round is then one of all
    workers that are present, as with elastic members: it ends at one time for all, and if a worker
    dies before, the others repeat it.

    Args:
        exchange: The exchange whose ``simulate`` computes the results.
        num_workers: Number of workers N.
        bucket_elements: Maximum length of the buckets of processes, in elements.
        compression: How messages are encoded. Default: not at all.
        times: Transfer times of messages. Default: no time.
        topology: The graph of gossip; None for other algorithms.
        timeline: Records the messages.
        admit: Called with a round, the worker that has sent its message last, and the time, before
            the round is complete; returns workers that join in this round.

    Attributes:
        present: The workers that rounds wait for.
        wakeups: Times and receivers of arrivals since the list was last cleared.
    """

    def __init__(
        self,
        exchange: Exchange,
        num_workers: int,
        bucket_elements: int,
        compression: Compression | None = None,
        *,
        times: LinkTimes | None = None,
        topology: Topology | None = None,
        timeline: Timeline | None = None,
        admit: Callable[[int, int, float], Iterable[int]] | None = None,
    ) -> None:
        self.exchange = exchange
        self.num_workers = num_workers
        self.bucket_elements = bucket_elements
        self.compression = compression
        self.times = times
        self.topology = topology
        self.timeline = timeline or Timeline(num_workers)
        self.admit = admit
        self.present = set(range(num_workers))
        self.wakeups: list[tuple[float, int]] = []
        self.links = [LinkQueue() for _ in range(num_workers)]
        self._rounds: dict[int, HubRound] = {}

    def of_worker(
        self, worker: int, clock: Clock, statistics: Statistics | None = None
    ) -> HubExchange:
        """Return the exchange of one worker, with that worker's clock."""
        return HubExchange(self, worker, clock, statistics or Statistics())

    def round_at(self, index: int) -> HubRound:
        """Return the messages of a round."""
        if index not in self._rounds:
            self._rounds[index] = HubRound(self, index)
        return self._rounds[index]

    def forget(self, index: int) -> None:
        """Free the memory of a round that all workers have received."""
        del self._rounds[index]

    def wake(self, workers: Iterable[int], time_s: float) -> None:
        """Record that results arrive for some workers at a time."""
        self.wakeups += [(time_s, worker) for worker in workers]

    def lose(self, worker: int, now_s: float) -> None:
        """Remove a dead worker from rounds that have not ended; the others repeat them."""
        for hub_round in list(self._rounds.values()):
            hub_round.lose(worker, now_s)

    def leave(self, worker: int, now_s: float) -> None:
        """Stop to wait for a worker, whose death the others have noticed."""
        self.present.discard(worker)
        for hub_round in list(self._rounds.values()):
            hub_round.complete_if_all_have_sent(now_s)


class HubRound:
    """The messages and statuses of one round.

    Args:
        hub: The hub that the workers share.
        index: Number of the round.

    Attributes:
        messages: The messages by worker.
        statuses: The statuses by worker.
        members: Members of a complete round of workers that come and go.
        arrives_s: Arrival times of the result, by worker; known once all messages are sent.
    """

    def __init__(self, hub: Hub, index: int) -> None:
        self.index = index
        self.messages: dict[int, Tensor] = {}
        self.statuses: dict[int, WorkerStatus] = {}
        self.members: list[int] = []
        self.arrives_s: dict[int, float] = {}
        self._hub = hub
        self._weights: dict[int, float] = {}
        self._sent_s: dict[int, float] = {}
        self._status_s = 0.0
        self._times: TransferTimes | None = None
        self._missing: dict[int, set[int]] = {}
        self._lengths: list[int] = []
        self._received: dict[int, Tensor] = {}
        self._released: set[int] = set()
        self._gone: set[int] = set()

    # ---------------------------------------------------------------------- statuses

    def add_status(self, worker: int, status: WorkerStatus, now_s: float) -> None:
        """Add the status of a worker."""
        self.statuses[worker] = status
        self._status_s = max(self._status_s, now_s)
        if self._hub.admit is None and len(self.statuses) == self._hub.num_workers:
            self._hub.wake(range(self._hub.num_workers), self._status_s)

    def has_statuses(self, worker: int, now_s: float) -> bool:
        """Whether a worker has received all statuses."""
        if self._hub.admit is not None:
            return self.has_arrived(worker, now_s)
        return len(self.statuses) == self._hub.num_workers and now_s >= self._status_s

    def all_statuses(self) -> list[WorkerStatus]:
        """Return the statuses of all members, in order."""
        workers = self.statuses if self._hub.admit is None else self.members
        return [self.statuses[worker] for worker in sorted(workers)]

    # ---------------------------------------------------------------------- messages

    def add_message(
        self, worker: int, bucket: Bucket, weight: float, now_s: float, statistics: Statistics
    ) -> None:
        """Add a copy of the message of a worker."""
        hub = self._hub
        self._gone.discard(worker)  # it may be back before the end of the round in which it died
        self.messages[worker], self._weights[worker] = bucket.wire.clone(), weight
        if not self._lengths:
            parts = [chunk.message for chunk in bucket.chunks]
            groups = group_chunks(parts, len, hub.bucket_elements)
            self._lengths = [sum(map(len, group)) for group in groups]
        self._sent_s[worker] = hub.links[worker].departure(now_s)
        if hub.admit is not None:
            self.complete_if_all_have_sent(self._sent_s[worker], worker)
        elif isinstance(hub.exchange, NeighborExchange):
            receivers = hub.exchange.receivers(worker, hub.num_workers, self.index)
            self._count_sent(worker, len(receivers) - 1, statistics)
            for receiver in receivers:
                missing = self._missing.get(receiver)
                if missing is None:
                    senders = hub.exchange.senders(receiver, hub.num_workers, self.index)
                    missing = self._missing[receiver] = set(senders)
                missing.discard(worker)
                if not missing:
                    senders = hub.exchange.senders(receiver, hub.num_workers, self.index)
                    self._arrive(receiver, max(self._sent_s[sender] for sender in senders))
        else:
            self._count_sent(worker, 0, statistics)
            if len(self.messages) == hub.num_workers:
                last_s = max(self._sent_s.values())
                for receiver in range(hub.num_workers):
                    self._arrive(receiver, last_s)

    def _count_sent(self, worker: int, num_messages: int, statistics: Statistics) -> None:
        """Count the bytes of a message, and occupy the worker's link with it."""
        statistics.bytes_sent += self._traffic.bytes_sent(num_messages)
        if self._hub.times is not None:
            time = self._transfer_times().of_worker(worker)
            self._hub.links[worker].send(self._sent_s[worker], time)

    def _arrive(self, worker: int, last_s: float) -> None:
        """Plan the arrival at a worker, to which the last message was sent at ``last_s``."""
        hub, time = self._hub, _NO_TIME
        if hub.times is not None:
            time = self._transfer_times().of_worker(worker)
        self.arrives_s[worker] = hub.links[worker].send(last_s, time)
        hub.timeline.add(worker, "send", last_s, self.arrives_s[worker])
        hub.wake([worker], self.arrives_s[worker])

    @property
    def _traffic(self) -> Traffic:
        """The traffic of a worker in this round."""
        exchange, wire = self._hub.exchange, next(iter(self.messages.values()))
        kind: ExchangeKind = "mean"
        if isinstance(exchange, NeighborExchange):
            kind = "neighbors"
        elif isinstance(exchange, Gather):
            kind = "gather"
        num_workers = len(self.members) or self._hub.num_workers
        encoding = Encoding(1, wire.element_size())
        if (compression := self._hub.compression) is not None:
            codec = compression.codec
            encoding = Encoding(codec.block, codec.row_bytes, codec.is_sparse)
        return Traffic.of(kind, len(wire), num_workers, encoding)

    def _transfer_times(self) -> TransferTimes:
        if self._times is None:
            assert self._hub.times is not None
            self._times = self._traffic.seconds(self._hub.times, self._hub.topology, self.index)
        return self._times

    def has_arrived(self, worker: int, now_s: float = math.inf) -> bool:
        """Whether the result has arrived at a worker."""
        return now_s >= self.arrives_s.get(worker, math.inf) < math.inf

    # ------------------------------------------------------------------ come and go

    def complete_if_all_have_sent(self, now_s: float, last: int | None = None) -> None:
        """Complete the round if all present workers have sent their messages.

        ``last`` is the last sender; None if the others no longer wait for a dead worker.
        """
        hub = self._hub
        assert hub.admit is not None
        if self.members or not hub.present or not hub.present <= self.messages.keys():
            return
        donor = min(hub.present) if last is None else last
        if joining := set(hub.admit(self.index, donor, now_s)):
            hub.present |= joining
            return
        self.members = sorted(hub.present)
        last_s = arrives_s = max(now_s, *(self._sent_s[worker] for worker in self.members))
        if hub.times is not None and len(self.members) > 1:
            num_bytes, hops = self._traffic.num_bytes, self._traffic.hops
            arrives_s += hub.times.mean(num_bytes, hops, self.index, self.members).seconds
        for worker in self.members:
            self.arrives_s[worker] = arrives_s
            hub.timeline.add(worker, "send", last_s, arrives_s)
        hub.wake(self.members, arrives_s)

    @property
    def bytes_sent(self) -> int:
        """Bytes that each member has sent in a complete round of workers that come and go."""
        return self._traffic.num_bytes

    def lose(self, worker: int, now_s: float) -> None:
        """Drop the message of a dead worker, and let the others repeat a round under way."""
        self._gone.add(worker)
        if self.members and worker in self.members and self.arrives_s[worker] > now_s:
            self.members, self.arrives_s = [], {}
        if not self.members:
            for kept in (self.messages, self._weights, self.statuses, self._sent_s):
                kept.pop(worker, None)
        self._forget_if_received_by_all()

    # ----------------------------------------------------------------------- results

    def received_by(self, worker: int) -> Tensor:
        """Return the result for a worker; RuntimeError if a message is missing."""
        hub = self._hub
        if not self.has_arrived(worker):
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        if isinstance(hub.exchange, NeighborExchange):
            return self._mixed(hub.exchange, worker)
        if not self._received:
            workers = self.members or range(hub.num_workers)
            split = [
                torch.split_with_sizes(self.messages[other], self._lengths) for other in workers
            ]
            weights = [self._weights[other] for other in workers]
            by_bucket = [
                hub.exchange.simulate(bucket, self.index, weights)
                for bucket in zip(*split, strict=True)
            ]
            received = [torch.cat(part, dim=-1) for part in zip(*by_bucket, strict=True)]
            self._received = dict(zip(workers, received, strict=True))
        return self._received[worker]

    def _mixed(self, exchange: NeighborExchange, worker: int) -> Tensor:
        count = self._hub.num_workers
        parts = {
            sender: torch.split_with_sizes(self.messages[sender], self._lengths)
            for sender in exchange.senders(worker, count, self.index)
        }
        received = []
        for bucket in range(len(self._lengths)):
            messages = {sender: split[bucket] for sender, split in parts.items()}
            received.append(exchange.simulate_worker(worker, count, messages, self.index))
        return torch.cat(received)

    def lost_of(self, worker: int) -> Tensor | None:
        """Return what compression removed from a message, if there is error feedback."""
        compression = self._hub.compression
        has_feedback = compression is not None and compression.has_feedback
        return self.messages[worker] if has_feedback else None

    def release(self, worker: int) -> None:
        """Record that a worker needs the round no longer; forget it after the last worker."""
        self._released.add(worker)
        self._forget_if_received_by_all()

    def _forget_if_received_by_all(self) -> None:
        hub = self._hub
        workers = set(range(hub.num_workers)) if hub.admit is None else set(self.members)
        if workers and workers <= self._released | self._gone:
            hub.forget(self.index)


class HubExchange(SeparateStatuses):
    """The exchange of one worker."""

    def __init__(self, hub: Hub, worker: int, clock: Clock, statistics: Statistics) -> None:
        super().__init__(WorkerGroup(worker, hub.num_workers, clock=clock), statistics)
        self.is_weighted = hub.exchange.is_weighted
        self._hub = hub
        self._worker = worker

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> HubHandle:
        """Send a copy of the worker's message to the hub."""
        hub_round = self._hub.round_at(round_index)
        now_s = self._group.clock.now()
        hub_round.add_message(self._worker, bucket, weight, now_s, self._statistics)
        return HubHandle(hub_round, self._worker, self._group.clock, self._statistics)

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Return the results of all workers, given all messages in order of the workers."""
        return self._hub.exchange.simulate(messages, round_index, weights)

    def send_status(self, status: WorkerStatus, label: str) -> HubStatuses:
        """Send this worker's status."""
        hub_round = self._hub.round_at(int(status.round_index))
        hub_round.add_status(self._worker, status, self._group.clock.now())
        return HubStatuses(hub_round, self._worker, self._group.clock, label)

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Raise RuntimeError: simulated workers do not wait for each other outside rounds."""
        raise RuntimeError("A simulation has no sync points.")


@dataclasses.dataclass
class HubStatuses:
    """The statuses of all workers in a round, for one of them."""

    hub_round: HubRound
    worker: int
    clock: Clock
    label: str
    has_been_read: bool = False

    def has_arrived(self) -> bool:
        """Whether all workers have sent their status."""
        return self.hub_round.has_statuses(self.worker, self.clock.now())

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses; RuntimeError if one is missing."""
        if not self.has_arrived():
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        self.has_been_read = True
        return self.hub_round.all_statuses()


@dataclasses.dataclass(eq=False)
class HubHandle:
    """Handle of a message that a worker has sent to the hub."""

    hub_round: HubRound
    worker: int
    clock: Clock
    statistics: Statistics

    @property
    def lost(self) -> Tensor | None:
        """What compression removed from the worker's message, if there is error feedback."""
        return self.hub_round.lost_of(self.worker)

    def has_arrived(self) -> bool:
        """Whether the result has arrived."""
        return self.hub_round.has_arrived(self.worker, self.clock.now())

    def wait(self) -> Tensor:
        """Return the result."""
        received = self.hub_round.received_by(self.worker)
        if self.hub_round.members:
            self.statistics.bytes_sent += self.hub_round.bytes_sent
        return received

    def release(self) -> None:
        """Release the round for this worker."""
        self.hub_round.release(self.worker)


class VirtualClock(Clock):
    """The time of one simulated worker, in seconds from the start of the simulation.

    Attributes:
        time_s: The time; it passes in local steps, and while the worker waits for others.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self.now = lambda: self.time_s
        self.wall_time = self.now

    def advance_to(self, time_s: float) -> None:
        """Let time pass until ``time_s``, unless it is later already."""
        self.time_s = max(self.time_s, time_s)
