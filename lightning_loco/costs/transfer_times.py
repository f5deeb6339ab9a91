"""How long messages take on links.

The emulator and the simulation take all times from here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_loco.costs.link import Link, Links
from lightning_loco.topology import Matching, Topology

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class TransferTime(NamedTuple):
    """How long a message takes on a link, in seconds.

    It occupies the link for ``busy_s``, so that the next message has to wait, and arrives
    ``latency_s`` later.
    """

    busy_s: float
    latency_s: float

    @property
    def seconds(self) -> float:
        """Time from sending the first byte to receiving the last one, in seconds."""
        return self.busy_s + self.latency_s


class LinkQueue:
    """The messages on one worker's link, which are sent one after the other.

    Attributes:
        free_at: When all messages so far have left the link, in seconds.
    """

    def __init__(self) -> None:
        self.free_at = 0.0

    def departure(self, now_s: float) -> float:
        """Return when a message can be sent that is ready now."""
        return max(now_s, self.free_at)

    def send(self, sent_s: float, time: TransferTime) -> float:
        """Occupy the link from ``sent_s`` on, and return when the message arrives."""
        busy_until = sent_s + time.busy_s
        self.free_at = max(self.free_at, busy_until)
        return busy_until + time.latency_s


class TransferTimes(NamedTuple):
    """The :class:`TransferTime` of all workers at once.

    Attributes:
        busy_s: By worker, ``(N,)``, in seconds.
        latency_s: By worker, ``(N,)``, in seconds.
    """

    busy_s: Array
    latency_s: Array

    def of_worker(self, worker: int) -> TransferTime:
        """Return the time of one worker."""
        return TransferTime(float(self.busy_s[worker]), float(self.latency_s[worker]))


class Route(NamedTuple):
    """The links that messages pass through, by message.

    Attributes:
        mbit_per_s: Bandwidth.
        uplink_mbit_per_s: Share of the uplink of a site; infinite inside a site, or without limit.
        latency_s: Latency without jitter.
        jitter_s: Largest additional delay.
        is_shared: Whether the message shares the links of sender and receiver with others; False
            if it has a separate link.
    """

    mbit_per_s: Array
    uplink_mbit_per_s: Array
    latency_s: Array
    jitter_s: Array
    is_shared: NDArray[np.bool_]

    def seconds(self, num_bytes: float) -> Array:
        """Return how long sending ``num_bytes`` takes, without the latency."""
        slower = np.minimum(self.mbit_per_s, self.uplink_mbit_per_s)
        return 8e-6 * num_bytes / slower


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    r"""How long exchanges of ``num_workers`` workers take on their links.

    The link of a worker carries both directions at once. All messages that the worker sends in a
    round share it, and so do all that it receives. The link of a pair is not shared. All messages
    of a round that leave a site share its uplink, and so do all that enter it, as if they were sent
    at the same time. The jitter of a worker's messages in a round is drawn from the seed, the round
    and the worker, so all workers compute the same.

    Args:
        links: Links of the workers.
        num_workers: Number of workers N.

    Example:
        >>> from lightning_loco.costs import Link, Links
        >>> times = LinkTimes(Links(Link(mbit_per_s=80, latency_s=0.01)), num_workers=2)
        >>> times.mean(1_000_000, hops=2, round_index=0)
        TransferTime(busy_s=0.1, latency_s=0.02)
    """

    links: Links
    num_workers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", self.links.of_size(self.num_workers))

    def mean(
        self,
        num_bytes: float,
        hops: int,
        round_index: int,
        workers: Sequence[int] | None = None,
    ) -> TransferTime:
        r"""Return the time of a collective; the slowest link determines it.

        Each worker sends to the next one, as in a ring all-reduce, which sends
        :math:`2 (N - 1) / N` of the message through each link in :math:`2 (N - 1)` hops. With fewer
        than :math:`N - 1` hops each worker sends equal parts to all others.

        Args:
            num_bytes: Bytes that each worker sends.
            hops: Number of messages in sequence, each of which adds a latency.
            round_index: Index of the round, for the jitter.
            workers: Those that take part, in this order. Default: all.
        """
        n = self.num_workers if workers is None else len(workers)
        if n < 2:
            return TransferTime(0.0, 0.0)
        if hops >= n - 1:
            senders, route = self._ring if workers is None else self._ring_of(np.array(workers))
        else:
            senders, route = self._to_all if workers is None else self._to_all_of(np.array(workers))
            num_bytes /= n - 1
        latency_s = float(self.latency_s(senders, route, round_index).max())
        return TransferTime(float(route.seconds(num_bytes).max()), hops * latency_s)

    @functools.cached_property
    def _ring(self) -> tuple[Indices, Route]:
        return self._ring_of(np.arange(self.num_workers))

    @functools.cached_property
    def _to_all(self) -> tuple[Indices, Route]:
        return self._to_all_of(np.arange(self.num_workers))

    def _ring_of(self, workers: Indices) -> tuple[Indices, Route]:
        """Return the senders and links of messages from each worker to the next one."""
        return workers, self.route(workers, np.roll(workers, -1))

    def _to_all_of(self, workers: Indices) -> tuple[Indices, Route]:
        """Return the senders and links of equal messages from each worker to each other one.

        Messages that share a link are one entry, with the bandwidth of each.
        """
        links, n = self.links, len(workers)
        sites = links.site_of(workers)
        at_site = np.bincount(sites, minlength=links.sites)
        own = np.zeros((2, self.num_workers))  # messages that each worker sends and receives
        own[:, workers] = (at_site - 1)[sites]
        crossing = np.tile(at_site * (n - at_site), (2, 1))  # that leave each site, and enter it
        present = set(workers.tolist())
        pairs = [pair for pair in links.by_pair if present.issuperset(pair)]
        for sender, receiver in pairs:
            origin, target = links.site_of(sender), links.site_of(receiver)
            on_link, first, second = (
                (own, sender, receiver) if origin == target else (crossing, origin, target)
            )
            on_link[0, first] -= 1
            on_link[1, second] -= 1
        messages = own.max(0)
        senders = [np.flatnonzero(messages), np.array([pair[0] for pair in pairs], dtype=np.int64)]
        shared = self.own[senders[0]]
        shared[:, 0] /= messages[senders[0]]
        passed = [shared, *([dataclasses.astuple(links.by_pair[pair])] for pair in pairs)]
        uplink = np.full(len(senders[0]) + len(pairs), math.inf)
        if links.between_sites is not None and crossing.any():
            senders.append(workers)
            passed.append(np.tile(np.array(dataclasses.astuple(links.between_sites)), (n, 1)))
            uplink = np.append(uplink, np.full(n, links.uplink_mbit_per_s / crossing.max()))
        mbit_per_s, latency_s, jitter_s = np.concatenate(passed).T
        is_shared = np.arange(len(uplink)) < len(senders[0])
        route = Route(mbit_per_s, uplink, latency_s, jitter_s, is_shared)
        return np.concatenate(senders), route

    def all_neighbors(
        self, num_bytes: float, topology: Topology, round_index: int
    ) -> TransferTimes:
        """Return the times until each worker has sent its messages and received its neighbors'.

        Args:
            num_bytes: Bytes of a message.
            topology: Who sends to whom.
            round_index: Index of the round, for the topology and the jitter.
        """
        n = self.num_workers
        senders, receivers = messages_of(topology, n, round_index)
        route = self.route(senders, receivers)
        shared = route.is_shared
        sent = np.bincount(senders[shared], minlength=n)
        received = np.bincount(receivers[shared], minlength=n)
        own_mbit_per_s = self.own[:, 0]
        busy_s = 8e-6 * (num_bytes * np.maximum(sent, received)) / own_mbit_per_s
        sending_s = 8e-6 * (num_bytes * sent) / own_mbit_per_s
        message_s = np.where(shared, sending_s[senders], route.seconds(num_bytes))
        np.maximum.at(busy_s, receivers, message_s)
        np.maximum.at(busy_s, senders[~shared], message_s[~shared])
        latency_s = np.zeros(n)
        np.maximum.at(latency_s, receivers, self.latency_s(senders, route, round_index))
        return TransferTimes(busy_s, latency_s)

    def fetch(self, worker: int, peer: int, num_bytes: float, count: int) -> TransferTime:
        """Return the time of a request to a peer and its reply of ``num_bytes``.

        ``count`` is the number of this worker's fetch, for the jitter. An uplink is shared as if
        all workers fetched at the same time, each from a random peer.
        """
        senders = np.array([worker, peer])
        route = self.route(senders, senders[::-1])
        latency_s = float(self.latency_s(senders, route, count).sum())
        busy_s = float(route.seconds(num_bytes)[1])
        if route.uplink_mbit_per_s[1] < math.inf:
            at_site = np.bincount(self.links.site_of(np.arange(self.num_workers)))
            crossing = at_site * (self.num_workers - at_site)
            part = num_bytes / (self.num_workers - 1)
            uplink_s = 8e-6 * part * crossing.max() / self.links.uplink_mbit_per_s
            busy_s = max(busy_s, float(uplink_s))
        return TransferTime(busy_s, latency_s)

    @functools.cached_property
    def own(self) -> Array:
        """The links of the workers: bandwidth, latency, jitter; ``(N, 3)``."""
        own = np.tile(np.array(dataclasses.astuple(self.links.default)), (self.num_workers, 1))
        for worker, link in self.links.workers:
            own[worker] = dataclasses.astuple(link)
        return own.astype(np.float64)

    def slowest_link(self) -> Link:
        """Return the worst of each property on the way around all workers."""
        _, ring = self._ring
        slowest_mbit_per_s = float(ring.mbit_per_s.min())
        return Link(slowest_mbit_per_s, float(ring.latency_s.max()), float(ring.jitter_s.max()))

    def route(self, senders: Indices, receivers: Indices) -> Route:
        """Return the links that messages pass through; those to other sites share uplinks."""
        links, first, second = self.links, self.own[senders], self.own[receivers]
        found = np.maximum(first, second)
        found[:, 0] = np.minimum(first[:, 0], second[:, 0])
        is_shared, uplink = np.ones(len(found), dtype=bool), np.full(len(found), math.inf)
        ends = zip(senders.tolist(), receivers.tolist(), strict=True) if links.pairs else ()
        for index, pair in enumerate(ends):
            if (link := links.by_pair.get(pair)) is not None:
                found[index], is_shared[index] = dataclasses.astuple(link), False
        if links.between_sites is not None:
            origins, targets = links.site_of(senders), links.site_of(receivers)
            leaves = is_shared & (origins != targets)
            found[leaves] = dataclasses.astuple(links.between_sites)
            sent = np.bincount(origins[leaves], minlength=links.sites)
            received = np.bincount(targets[leaves], minlength=links.sites)
            beside = np.maximum(sent[origins[leaves]], received[targets[leaves]])
            uplink[leaves] = links.uplink_mbit_per_s / beside
            is_shared &= ~leaves
        return Route(found[:, 0], uplink, found[:, 1], found[:, 2], is_shared)

    def latency_s(self, senders: Indices, route: Route, index: int) -> Array:
        """Return the latency of messages, with the jitter of round ``index``."""
        if not route.jitter_s.any():
            return route.latency_s
        draws = draw(self.links.seed, index, self.num_workers)
        return route.latency_s + route.jitter_s * draws[senders]


@functools.lru_cache(maxsize=32)  # 26 MB for 100,000 workers
def draw(seed: int, index: int, num_workers: int) -> Array:
    """Return a random number from 0 to 1 for each worker, ``(N,)``; ``index`` is from 0 on."""
    return np.random.default_rng((seed % 2**64, index)).random(num_workers)


def messages_of(topology: Topology, num_workers: int, round_index: int) -> tuple[Indices, Indices]:
    """Return the senders and the receivers of all messages of a round of gossip.

    Example:
        >>> from lightning_loco.topology import Star
        >>> senders, receivers = messages_of(Star(), 3, 0)
        >>> list(zip(senders.tolist(), receivers.tolist()))
        [(0, 1), (0, 2), (1, 0), (2, 0)]
    """
    period = topology.period(num_workers)
    return _messages_of(topology, num_workers, round_index % period if period else round_index)


@functools.lru_cache(maxsize=8)
def _messages_of(topology: Topology, num_workers: int, round_index: int) -> tuple[Indices, Indices]:
    workers = range(num_workers)
    if isinstance(topology, Matching):
        partners = np.array([topology.partner(w, num_workers, round_index) for w in workers])
        senders = np.flatnonzero(partners != np.arange(num_workers))
        return senders, partners[senders]
    to = [topology.receivers(worker, num_workers, round_index) for worker in workers]
    senders = np.repeat(np.arange(num_workers), [len(receivers) for receivers in to])
    return senders, np.array([peer for receivers in to for peer in receivers], dtype=np.int64)
