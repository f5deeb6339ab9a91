"""Where the messages of simulated workers meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.buckets import Bucket, group_chunks
from lightning_loco.engine.exchanges.base import Exchange, SeparateStatuses


class Hub:
    """Collects the messages of all workers, and hands out what the exchange makes of them.

    A worker's message is one bucket here, and is exchanged as the buckets that processes send.

    Args:
        exchange: Its ``simulate`` says what each worker receives.
        num_workers: Number of workers N.
        bucket_elements: The longest bucket of a process.
        has_feedback: Whether what is lost of messages is fed back.
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
        self.has_feedback = has_feedback
        self._bucket_elements = bucket_elements
        self._rounds: dict[tuple[int, int], HubRound] = {}

    def of_worker(self, worker: int) -> HubExchange:
        """The exchange as one worker sees it."""
        return HubExchange(self, worker)

    def round_of(self, bucket: Bucket, index: int) -> HubRound:
        """Where this bucket's messages of a round are; earlier rounds are forgotten."""
        key = (index, bucket.slices[0].start)
        if key not in self._rounds:
            groups = group_chunks([chunk.params for chunk in bucket.chunks], self._bucket_elements)
            lengths = [sum(map(len, group)) for group in groups]
            self._rounds = {k: r for k, r in self._rounds.items() if k[0] == index}
            self._rounds[key] = HubRound(self, index, lengths)
        return self._rounds[key]


@dataclasses.dataclass
class HubRound:
    """The messages of one bucket in one round.

    Attributes:
        hub: Where they meet.
        index: Number of the round.
        lengths: Of the buckets that processes would send.
        messages: By worker.
        received: What each worker receives, once it was asked for.
    """

    hub: Hub
    index: int
    lengths: list[int]
    messages: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    received: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the messages of all workers are here."""
        return len(self.messages) == self.hub.num_workers

    def get(self, worker: int) -> Tensor:
        """What one worker receives; RuntimeError if a message is missing."""
        if not self.is_complete:
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        if not self.received:
            workers, exchange = range(self.hub.num_workers), self.hub.exchange
            messages = [torch.split_with_sizes(self.messages[w], self.lengths) for w in workers]
            buckets = zip(*messages, strict=True)
            received = [exchange.simulate(bucket, self.index) for bucket in buckets]
            self.received = [torch.cat(parts) for parts in zip(*received, strict=True)]
        return self.received[worker]


class HubExchange(SeparateStatuses):
    """One worker's access to the hub; what it receives is divided by the weights already.

    Args:
        hub: Shared by all workers.
        worker: Number of this one.
    """

    def __init__(self, hub: Hub, worker: int) -> None:
        super().__init__(WorkerGroup(0, 1), Statistics())
        self._hub = hub
        self._worker = worker

    def start(self, bucket: Bucket, round_index: int) -> HubHandle:
        """Leave a copy of a worker's message at the hub."""
        hub_round = self._hub.round_of(bucket, round_index)
        hub_round.messages[self._worker] = bucket.wire.clone()
        return HubHandle(hub_round, self._worker)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker receives, given all messages in order of the workers."""
        return self._hub.exchange.simulate(messages, round_index)


class HubHandle(NamedTuple):
    """A bucket that a worker has left at the hub, in the round that it belongs to."""

    hub_round: HubRound
    worker: int

    @property
    def lost(self) -> Tensor | None:
        """What is lost of the worker's message, if it is fed back."""
        return self.hub_round.messages[self.worker] if self.hub_round.hub.has_feedback else None

    def has_arrived(self) -> bool:
        """Whether all workers have left their messages."""
        return self.hub_round.is_complete

    def wait(self) -> Tensor:
        """What this worker receives."""
        return self.hub_round.get(self.worker)

    def release(self) -> None:
        """Do nothing: the hub's memory is not used again."""
