"""How often decoupled learners can exchange a fragment with their syncer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from lightning_loco.costs.transfer_times import LinkTimes, Route

IN_FLIGHT = 2
"""Fragments that a learner exchanges between two questions to the syncer, if its link is busy."""


@dataclasses.dataclass(frozen=True)
class SyncerTimes:
    """Seconds of the requests of learners: pushes, questions and fetches, one after the other.

    A request takes two latencies of the learner's link and its bytes. The syncer is at the site of
    worker 0 and has the same link, which carries the pushes of all learners in one direction and
    what they fetch in the other, and so does the uplink of its site.

    Args:
        times: The links of the learners.
        push_bytes: Of the pseudo-gradient of a fragment.
        fetch_bytes: Of the parameters of a fragment.

    Example:
        >>> from lightning_loco.costs import Link, Links
        >>> times = LinkTimes(Links(Link(mbit_per_s=80, latency_s=0.01)), num_workers=2)
        >>> syncer = SyncerTimes(times, 1_000_000, 1_000_000)
        >>> round(syncer.exchange_s, 9), round(syncer.pace_s, 9)
        (0.26, 0.25)
    """

    times: LinkTimes
    push_bytes: int
    fetch_bytes: int

    @property
    def exchange_s(self) -> float:
        """From a push until its result has arrived, at the learner with the slowest link."""
        return self._learner_s(1.0)

    @property
    def pace_s(self) -> float:
        """Seconds in which the links carry the exchange of a fragment of all learners."""
        return max(self._learner_s(1 / IN_FLIGHT), self._syncer_s)

    def _learner_s(self, questions: float) -> float:
        latency_s = 2 * (2 + questions) * (self._route.latency_s + self._route.jitter_s / 2)
        bytes_s = 8e-6 * (self.push_bytes + self.fetch_bytes) / self._route.mbit_per_s
        return float((bytes_s + latency_s).max())

    @property
    def _syncer_s(self) -> float:
        most = max(self.push_bytes, self.fetch_bytes)
        shared_s = int(self._route.is_shared.sum()) * self.times.links.of_worker(0).seconds(most)
        return max(shared_s, float((8e-6 * most / self._route.uplink_mbit_per_s).max()))

    @functools.cached_property
    def _route(self) -> Route:
        numbers = np.arange(self.times.num_workers)
        return self.times.route(numbers, np.zeros_like(numbers))
