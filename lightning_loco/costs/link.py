"""Links of workers: bandwidth, latency and jitter, of each worker, pair or site."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Workers = TypeVar("Workers", int, NDArray[np.int64])
"""A number of a worker, or an array of them."""


@dataclasses.dataclass(frozen=True)
class Link:
    r"""The network link of a worker.

    Sending a message of B bytes takes :math:`8 B / (10^6\,` ``mbit_per_s`` :math:`)` seconds, and
    it arrives ``latency_s`` later, plus a random delay of up to ``jitter_s``.

    Args:
        mbit_per_s: Bandwidth in megabits (millions of bits) per second, in each direction;
            ``math.inf`` for no limit.
        latency_s: One-way latency, in seconds.
        jitter_s: Largest random delay in addition, in seconds.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of range.

    Example:
        >>> Link(mbit_per_s=100, latency_s=0.03).seconds(1_000_000)
        0.08
    """

    mbit_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{field.name} of a link must be a number, got {value!r}.")
        if not self.mbit_per_s > 0:
            raise ValueError(
                "mbit_per_s of a link must be positive (inf for no limit), got "
                f"{self.mbit_per_s!r}."
            )
        for name in ("latency_s", "jitter_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} of a link is in seconds, at least 0 and finite, got "
                    f"{getattr(self, name)!r}."
                )

    def seconds(self, num_bytes: float) -> float:
        """Return how long sending ``num_bytes`` takes, without the latency."""
        return 8e-6 * num_bytes / self.mbit_per_s

    def slower(self, other: Link) -> Link:
        """Return the link of a message that passes through both: the worse of each property."""
        return Link(
            min(self.mbit_per_s, other.mbit_per_s),
            max(self.latency_s, other.latency_s),
            max(self.jitter_s, other.jitter_s),
        )


LINKS = {
    "wan": Link(100, 0.03, 0.003),
    "dsl": Link(20, 0.02, 0.005),
    "lan": Link(1000, 0.0002),
    "datacentre": Link(25_000, 0.00002),
}
"""Links by name: between two sites, at home, within a building, within a rack."""


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of all workers.

    Args:
        default: Link of every worker that is not in ``workers``.
        workers: Numbers of workers, and their links.
        pairs: Sender, receiver, and a link that only messages between these two use.
        seed: Seed of the jitter.
        num_workers: Number of workers that the links are for; None for any.
        sites: Number of sites, such as data centres. The first N / ``sites`` workers are at the
            first one, and so on.
        between_sites: Separate link of any two workers at different sites, unless theirs is in
            ``pairs``. None if ``sites`` is 1.
        uplink_mbit_per_s: Bandwidth that all messages from a site to others share, and all messages
            to it, in megabits per second. Links in ``pairs`` have no part in it. Default: no limit.

    Raises:
        TypeError: If the seed or the number of sites is not an integer, or the bandwidth no number.
        ValueError: If ``sites``, ``between_sites`` and ``uplink_mbit_per_s`` do not fit each other.
    """

    default: Link
    workers: tuple[tuple[int, Link], ...] = ()
    pairs: tuple[tuple[int, int, Link], ...] = ()
    seed: int = 0
    num_workers: int | None = None
    sites: int = 1
    between_sites: Link | None = None
    uplink_mbit_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("seed", "sites"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of the links must be an integer, got {value!r}.")
        if self.sites < 1 or (self.sites > 1) != (self.between_sites is not None):
            raise ValueError(
                "sites is a number from 1 on, and several sites need between_sites, the link "
                f"between them; got sites={self.sites}, between_sites={self.between_sites}."
            )
        uplink = self.uplink_mbit_per_s
        if isinstance(uplink, bool) or not isinstance(uplink, (int, float)):
            raise TypeError(f"uplink_mbit_per_s of the links must be a number, got {uplink!r}.")
        if not uplink > 0:
            raise ValueError(
                f"uplink_mbit_per_s must be positive (inf for no limit), got {uplink!r}."
            )
        if uplink < math.inf and self.sites == 1:
            raise ValueError(
                f"uplink_mbit_per_s={uplink:g} is the line from a site to others and needs at "
                "least two sites. Give sites and between_sites, too."
            )

    def check(self, num_workers: int) -> None:
        """Raise ValueError if the links do not fit the number of workers."""
        if self.num_workers not in (None, num_workers):
            raise ValueError(
                f"link has {self.num_workers} entries, one for each worker, but there are "
                f"{num_workers} workers. Give one link for all, or {num_workers}."
            )
        named = {worker for worker, _ in self.workers}
        named |= {worker for first, second, _ in self.pairs for worker in (first, second)}
        for worker in sorted(named):
            if worker >= num_workers:
                raise ValueError(
                    f"link names worker {worker}, but there are {num_workers} workers, numbered "
                    f"0 to {num_workers - 1}."
                )
        if self.sites > num_workers:
            raise ValueError(
                f"link has {self.sites} sites, but there are {num_workers} workers. Give at most "
                "as many sites as workers."
            )

    def of_size(self, num_workers: int) -> Links:
        """Return the links for this number of workers, which says who is at which site."""
        return dataclasses.replace(self, num_workers=num_workers)

    @functools.cached_property
    def _by_worker(self) -> dict[int, Link]:
        return dict(self.workers)

    @functools.cached_property
    def by_pair(self) -> dict[tuple[int, int], Link]:
        """The links of ``pairs``, by sender and receiver."""
        return {(sender, receiver): link for sender, receiver, link in self.pairs}

    def of_worker(self, worker: int) -> Link:
        """Return the link of a worker, for messages to and from all others."""
        return self._by_worker.get(worker, self.default)

    def of_pair(self, sender: int, receiver: int) -> Link | None:
        """Return the link that only these two use, or None.

        Raises:
            ValueError: If there are several sites and the number of workers is not known.
        """
        if (link := self.by_pair.get((sender, receiver))) is not None:
            return link
        if self.sites > 1 and self.site_of(sender) != self.site_of(receiver):
            return self.between_sites
        return None

    def site_of(self, worker: Workers) -> Workers:
        """Return the index of the site of a worker, or of many; ValueError if N is not known."""
        if self.num_workers is None:
            raise ValueError(
                "Sites divide a known number of workers. Use links.of_size(num_workers)."
            )
        return worker * self.sites // self.num_workers

    def between(self, sender: int, receiver: int) -> Link:
        """Return the link that a message between these two passes through, without uplinks."""
        pair_link = self.of_pair(sender, receiver)
        return pair_link or self.of_worker(sender).slower(self.of_worker(receiver))


NETWORKS = {
    "two_datacentres": Links(LINKS["datacentre"], sites=2, between_sites=Link(1000, 0.03, 0.003)),
    "two_datacentres_one_line": Links(
        LINKS["datacentre"],
        sites=2,
        between_sites=Link(1000, 0.03, 0.003),
        uplink_mbit_per_s=1000,
    ),
    "one_slow_link": Links(LINKS["lan"], workers=((0, LINKS["dsl"]),)),
}
"""Links of all workers by name: two sites, and a separate link between any two workers at different
sites; two sites with one line between them; all within a building, but worker 0 at home."""
