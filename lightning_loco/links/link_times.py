"""How long messages take on the workers' links: pure arithmetic."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import NamedTuple

from lightning_loco.links.links import Links
from lightning_loco.topology import Topology


class Span(NamedTuple):
    """What a message takes.

    Attributes:
        busy_s: So long a link is busy with it; what is sent next waits.
        latency_s: So long it is on the way besides.
    """

    busy_s: float
    latency_s: float

    @property
    def seconds(self) -> float:
        """From the first byte that leaves to the last one that arrives."""
        return self.busy_s + self.latency_s


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    r"""The time that exchanges of ``num_workers`` workers take on their links.

    A worker's link carries both directions at once, and all that the worker sends or receives in a
    round shares it. What a pair has for itself nobody shares. The jitter of what a worker sends in
    a round is drawn from the seed, the round and the worker, so that all agree on it.

    Args:
        links: Of the workers.
        num_workers: Number of workers N.

    Example:
        >>> from lightning_loco.links.link import Link
        >>> times = LinkTimes(Links(Link(mbit_per_s=80, latency_s=0.01)), num_workers=2)
        >>> times.mean(1_000_000, hops=2, round_index=0)
        Span(busy_s=0.1, latency_s=0.02)
    """

    links: Links
    num_workers: int

    def mean(self, num_bytes: float, hops: int, round_index: int) -> Span:
        r"""A collective of all workers, in which the slowest link keeps everybody waiting.

        Messages go from each worker to the next one, as in a ring all-reduce, which sends
        :math:`2 (N - 1) / N` of the message through each link in :math:`2 (N - 1)` hops.

        Args:
            num_bytes: That each worker sends.
            hops: How many messages follow upon each other, each a latency later.
            round_index: Which round, for the jitter.
        """
        n = self.num_workers
        if n == 1:
            return Span(0.0, 0.0)
        ring = [(worker, (worker + 1) % n) for worker in range(n)]
        busy_s = max(self.links.between(*pair).seconds(num_bytes) for pair in ring)
        return Span(busy_s, hops * self._latest(ring, round_index))

    def neighbors(
        self, worker: int, num_bytes: float, topology: Topology, round_index: int
    ) -> Span:
        """A message to each receiver of a topology, until a worker has those of its neighbours.

        Args:
            worker: Who waits.
            num_bytes: Of one message.
            topology: Who sends to whom.
            round_index: Which round, of the topology and for the jitter.
        """
        links, n = self.links, self.num_workers

        def sent_by(sender: int) -> list[tuple[int, int]]:
            return [(sender, other) for other in topology.receivers(sender, n, round_index)]

        def shares(pairs: Iterable[tuple[int, int]]) -> int:
            return sum(links.own(*pair) is None for pair in pairs)

        senders = [other for other in topology.weights(worker, n, round_index) if other != worker]
        received = [(sender, worker) for sender in senders]
        sent = sent_by(worker)
        own = links.of(worker)
        busy = [own.seconds(num_bytes * max(shares(received), shares(sent)))]
        for pair in (*received, *sent):
            if (alone := links.own(*pair)) is not None:
                busy.append(alone.seconds(num_bytes))
        for sender, _ in received:
            if links.own(sender, worker) is None:
                busy.append(links.of(sender).seconds(num_bytes * shares(sent_by(sender))))
        return Span(max(busy), self._latest(received, round_index))

    def fetch(self, worker: int, peer: int, num_bytes: float, count: int) -> Span:
        """A request to a peer, and its answer.

        Args:
            worker: Who asks.
            peer: Who answers.
            num_bytes: Of the answer.
            count: Which fetch of this worker, for the jitter.
        """
        there, back = (worker, peer), (peer, worker)
        latency_s = self._latest([there], count) + self._latest([back], count)
        return Span(self.links.between(*back).seconds(num_bytes), latency_s)

    def _latest(self, pairs: Iterable[tuple[int, int]], index: int) -> float:
        """The longest latency of messages from the first to the second of each pair."""
        latest = 0.0
        for sender, receiver in pairs:
            link = self.links.between(sender, receiver)
            late = link.jitter_s and link.jitter_s * self._luck(sender, index)
            latest = max(latest, link.latency_s + late)
        return latest

    def _luck(self, sender: int, index: int) -> float:
        return random.Random(f"{self.links.seed} {index} {sender}").random()
