"""The messages of simulated workers: all are in the memory of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_loco.clock import Clock
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.engine.buckets import Bucket, group_chunks
from lightning_loco.engine.exchanges.base import Exchange, SeparateStatuses
from lightning_loco.engine.exchanges.neighbor import NeighborExchange


class Hub:
    """Collects the messages and the statuses of all workers, and returns the exchange's results.

    Here the whole message of a worker in a round is one bucket. The exchange is applied to the
    buckets that processes would send, so that the numbers are the same.

    Args:
        exchange: The exchange whose ``simulate`` computes what each worker receives.
        num_workers: Number of workers N.
        bucket_elements: Maximum length of the buckets of processes, in elements.
        has_feedback: Whether the compression keeps what is lost of messages.

    Attributes:
        reached: The workers for which a message or status has come since they were last cleared.
    """

    def __init__(
        self,
        exchange: Exchange,
        num_workers: int,
        bucket_elements: int,
        has_feedback: bool = False,
    ) -> None:
        self.exchange = exchange
        self.num_workers = num_workers
        self.bucket_elements = bucket_elements
        self.has_feedback = has_feedback
        self.reached: set[int] = set()
        self._rounds: dict[int, HubRound] = {}

    def of_worker(self, worker: int, clock: Clock) -> HubExchange:
        """Return the exchange of one worker, whose time its ``clock`` shows."""
        return HubExchange(self, worker, clock)

    def round_at(self, index: int) -> HubRound:
        """Return the messages of a round."""
        if index not in self._rounds:
            self._rounds[index] = HubRound(self, index)
        return self._rounds[index]

    def forget(self, index: int) -> None:
        """Free the memory of a round that all workers have received."""
        del self._rounds[index]


class HubRound:
    """The messages and statuses of one round.

    Args:
        hub: The hub that the workers share.
        index: Number of the round.

    Attributes:
        messages: The messages by worker.
        statuses: The statuses by worker.
    """

    def __init__(self, hub: Hub, index: int) -> None:
        self.index = index
        self.messages: dict[int, Tensor] = {}
        self.statuses: dict[int, WorkerStatus] = {}
        self._hub = hub
        self._lengths: list[int] = []
        self._received: list[Tensor] = []
        self._num_released = 0

    def add_status(self, worker: int, status: WorkerStatus) -> None:
        """Add the status of a worker."""
        self.statuses[worker] = status
        if self.has_statuses:
            self._hub.reached.update(range(self._hub.num_workers))

    @property
    def has_statuses(self) -> bool:
        """Whether all workers have sent their status."""
        return len(self.statuses) == self._hub.num_workers

    def add_message(self, worker: int, bucket: Bucket) -> None:
        """Add a copy of the message of a worker."""
        hub = self._hub
        self.messages[worker] = bucket.wire.clone()
        if not self._lengths:
            parts = [chunk.message for chunk in bucket.chunks]
            groups = group_chunks(parts, len, hub.bucket_elements)
            self._lengths = [sum(map(len, group)) for group in groups]
        if isinstance(hub.exchange, NeighborExchange):
            hub.reached.update(hub.exchange.receivers(worker, hub.num_workers, self.index))
        elif len(self.messages) == hub.num_workers:
            hub.reached.update(range(hub.num_workers))

    def has_arrived(self, worker: int) -> bool:
        """Whether all have sent whose messages a worker receives."""
        hub = self._hub
        if isinstance(hub.exchange, NeighborExchange):
            senders = hub.exchange.senders(worker, hub.num_workers, self.index)
            return all(sender in self.messages for sender in senders)
        return len(self.messages) == hub.num_workers

    def received_by(self, worker: int) -> Tensor:
        """Return what a worker receives; RuntimeError if a message is missing."""
        hub = self._hub
        if not self.has_arrived(worker):
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        if isinstance(hub.exchange, NeighborExchange):
            parts = {
                sender: torch.split_with_sizes(self.messages[sender], self._lengths)
                for sender in hub.exchange.senders(worker, hub.num_workers, self.index)
            }
            received = []
            for bucket in range(len(self._lengths)):
                messages = {sender: split[bucket] for sender, split in parts.items()}
                received.append(
                    hub.exchange.simulate_worker(worker, hub.num_workers, messages, self.index)
                )
            return torch.cat(received)
        if not self._received:
            split = [
                torch.split_with_sizes(self.messages[other], self._lengths)
                for other in range(hub.num_workers)
            ]
            by_bucket = [
                hub.exchange.simulate(bucket, self.index) for bucket in zip(*split, strict=True)
            ]
            self._received = [torch.cat(part, dim=-1) for part in zip(*by_bucket, strict=True)]
        return self._received[worker]

    def release(self) -> None:
        """Count a worker that has received its message; forget the round after the last one."""
        self._num_released += 1
        if self._num_released == self._hub.num_workers:
            self._hub.forget(self.index)


class HubExchange(SeparateStatuses):
    """The exchange of one worker."""

    def __init__(self, hub: Hub, worker: int, clock: Clock) -> None:
        super().__init__(WorkerGroup(worker, hub.num_workers, clock=clock), Statistics())
        self.is_weighted = hub.exchange.is_weighted
        self._hub = hub
        self._worker = worker

    def start(self, bucket: Bucket, round_index: int) -> HubHandle:
        """Send a copy of the worker's message to the hub."""
        hub_round = self._hub.round_at(round_index)
        hub_round.add_message(self._worker, bucket)
        return HubHandle(self._hub, hub_round, self._worker)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker receives, given all messages in order of the workers."""
        return self._hub.exchange.simulate(messages, round_index)

    def send_status(self, status: WorkerStatus, label: str) -> HubStatuses:
        """Send this worker's status."""
        hub_round = self._hub.round_at(int(status.round_index))
        hub_round.add_status(self._worker, status)
        return HubStatuses(hub_round, label)

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Raise RuntimeError: simulated workers do not wait for each other outside rounds."""
        raise RuntimeError("A simulation has no sync points.")


@dataclasses.dataclass
class HubStatuses:
    """The statuses of all workers in a round."""

    hub_round: HubRound
    label: str
    has_been_read: bool = False

    def has_arrived(self) -> bool:
        """Whether all workers have sent their status."""
        return self.hub_round.has_statuses

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses; RuntimeError if one is missing."""
        if not self.has_arrived():
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        self.has_been_read = True
        return [self.hub_round.statuses[worker] for worker in sorted(self.hub_round.statuses)]


class HubHandle:
    """The bucket that a worker has sent to the hub."""

    def __init__(self, hub: Hub, hub_round: HubRound, worker: int) -> None:
        self._has_feedback = hub.has_feedback
        self._round = hub_round
        self._worker = worker

    @property
    def lost(self) -> Tensor | None:
        """What the codec has lost of the worker's message, if the compression keeps it."""
        return self._round.messages[self._worker] if self._has_feedback else None

    def has_arrived(self) -> bool:
        """Whether all messages for this worker have been sent."""
        return self._round.has_arrived(self._worker)

    def wait(self) -> Tensor:
        """Return what this worker receives."""
        return self._round.received_by(self._worker)

    def release(self) -> None:
        """The worker needs the round no longer."""
        self._round.release()


class VirtualClock(Clock):
    """The time of one simulated worker, in seconds from the start of the simulation.

    Attributes:
        time_s: It passes in local steps, and while the worker waits for others.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self.now = lambda: self.time_s
        self.wall_time = self.now

    def advance_to(self, time_s: float) -> None:
        """Let time pass until ``time_s``, unless it is later already."""
        self.time_s = max(self.time_s, time_s)
