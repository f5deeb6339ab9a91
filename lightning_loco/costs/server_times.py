"""How long the messages of a remote optimizer take: gradients to a server, parameters back."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lightning_loco.costs.transfer_times import Array, LinkTimes, Route

PREFETCH_BYTES = 16 * 2**20
"""Memory of a server for the parts of each gradient that it receives before it adds them."""

BUCKET_BYTES = 4 * 2**20
"""Bytes of the messages in which gradients and parameters are sent, by default."""


@dataclasses.dataclass(frozen=True)
class ServerTimes:
    """Arrival times in seconds: gradients at the server, parameters at the workers.

    The server is at the site of worker 0 and has the same link. The messages of all workers
    share it, the first one sent first, and so do all replies, which are sent side by side. Before
    the last worker sends its gradient, the server receives of each other one as many buckets as
    :data:`PREFETCH_BYTES` hold, less one, which is about 12 MiB. Messages of workers at other sites
    share the uplink of the server's site in the same way.

    Args:
        times: The links of the workers.
        num_bytes: Bytes of the gradient of a worker. The parameters that come back are as long.
        adds_to_first: Whether the server receives the gradient of worker 0 into the sum, and so all
            of it ahead, as it does without compression.

    Example:
        >>> from lightning_loco.costs import Link, Links
        >>> times = LinkTimes(Links(Link(mbit_per_s=80, latency_s=0.01)), num_workers=2)
        >>> ServerTimes(times, 1_000_000).gradients(np.array([0.0, 0.05]), 0)
        array([0.11, 0.21])
    """

    times: LinkTimes
    num_bytes: int
    adds_to_first: bool = True

    def gradients(self, sent_s: Array, index: int) -> Array:
        """Return when the gradient of each worker is at the server, ``(N,)``.

        Args:
            sent_s: When each worker sends it, ``(N,)``.
            index: Index of the step, for the jitter.
        """
        route, latency_s = self._links(index)
        late = self._late_shares(sent_s)
        alone_s = 8e-6 * self.num_bytes / route.mbit_per_s
        done_s, late_s = sent_s + alone_s, alone_s * late
        through_uplink = route.uplink_mbit_per_s < math.inf
        uplink_s = 8e-6 * self.num_bytes / self.times.links.uplink_mbit_per_s
        for chosen, each_s in ((route.is_shared, self._of_server), (through_uplink, uplink_s)):
            passed_s = _in_turn(sent_s[chosen], latency_s[chosen], each_s)
            done_s[chosen] = np.maximum(done_s[chosen], passed_s)
            late_s[chosen] = np.maximum(late_s[chosen], each_s * late[chosen].sum())
        done_s = np.where(late > 0, np.maximum(done_s, sent_s.max() + late_s), done_s)
        return done_s + latency_s

    def parameters(self, known_s: float, index: int) -> Array:
        """Return when each worker has the parameters, ``(N,)``.

        ``known_s`` is when the server has all gradients, and ``index`` as in :meth:`gradients`.
        """
        route, latency_s = self._links(index, to_server=False)
        queued_s = np.where(route.is_shared, int(route.is_shared.sum()) * self._of_server, 0.0)
        done_s: Array = known_s + np.maximum(route.seconds(self.num_bytes), queued_s)
        return done_s + latency_s

    def _late_shares(self, sent_s: Array) -> Array:
        """Return how much of each gradient is received once the last worker sends, from 0 to 1."""
        num_buckets = -(-self.num_bytes // BUCKET_BYTES)
        ahead = max(1, min(num_buckets, PREFETCH_BYTES // BUCKET_BYTES) - 1) * BUCKET_BYTES
        late = np.full(len(sent_s), max(0.0, 1 - ahead / self.num_bytes))
        if self.adds_to_first:
            late[0] = 0
        late[sent_s.argmax()] = 1
        return late

    @property
    def _of_server(self) -> float:
        """How long the message of one worker takes on the link of the server."""
        return self.times.links.of_worker(0).seconds(self.num_bytes)

    def _links(self, index: int, to_server: bool = True) -> tuple[Route, Array]:
        """Return routes to the server or from it, and their latencies."""
        numbers = np.arange(self.times.num_workers)
        ends = numbers, np.zeros_like(numbers)
        route = self.times.route(*(ends if to_server else ends[::-1]))
        return route, self.times.latency_s(numbers, route, index)


def _in_turn(sent_s: Array, latency_s: Array, each_s: float) -> Array:
    """Return when messages have passed through a link that takes ``each_s`` for one of them.

    The first one sent is the first one; ``latency_s`` decides among those sent at the same time.
    """
    order, places = np.lexsort((latency_s, sent_s)), np.arange(len(sent_s))
    begins_s = np.maximum.accumulate(sent_s[order] - places * each_s)
    passed_s = np.empty(len(sent_s))
    passed_s[order] = begins_s + (places + 1) * each_s
    return passed_s
