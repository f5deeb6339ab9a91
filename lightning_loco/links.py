"""Links of workers: bandwidth, latency, jitter, and how long messages take.

The emulator and the simulation take all times from here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lightning_loco.topology import Matching, Topology

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
_KEYS = ("default", "workers", "pairs", "sites", "between_sites", "seed")
_PAIR = re.compile(r"\s*(\d+)\s*(-|->)\s*(\d+)\s*")
_SUFFIXES = (".yaml", ".yml", ".json")


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
        between_sites: Link that any two workers at different sites have for themselves, unless it
            is in ``pairs``. None if ``sites`` is 1.

    Raises:
        TypeError: If the seed or the number of sites is not an integer.
        ValueError: If ``sites`` and ``between_sites`` do not fit each other.
    """

    default: Link
    workers: tuple[tuple[int, Link], ...] = ()
    pairs: tuple[tuple[int, int, Link], ...] = ()
    seed: int = 0
    num_workers: int | None = None
    sites: int = 1
    between_sites: Link | None = None

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
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        return {(sender, receiver): link for sender, receiver, link in self.pairs}

    def of_worker(self, worker: int) -> Link:
        """Return the link of a worker, for messages to and from all others."""
        return self._by_worker.get(worker, self.default)

    def of_pair(self, sender: int, receiver: int) -> Link | None:
        """Return the link that only messages between these two use, or None.

        Raises:
            ValueError: If there are several sites and the number of workers is not known.
        """
        if (link := self._by_pair.get((sender, receiver))) is not None:
            return link
        if self.sites > 1 and self.site_of(sender) != self.site_of(receiver):
            return self.between_sites
        return None

    def site_of(self, worker: int) -> int:
        """Return the index of the site of a worker; ValueError if N is not known."""
        if self.num_workers is None:
            raise ValueError(
                "Sites divide a known number of workers. Use links.of_size(num_workers)."
            )
        return worker * self.sites // self.num_workers

    def between(self, sender: int, receiver: int) -> Link:
        """Return the link that a message between these two passes through."""
        pair_link = self.of_pair(sender, receiver)
        return pair_link or self.of_worker(sender).slower(self.of_worker(receiver))


NETWORKS = {
    "two_datacentres": Links(LINKS["datacentre"], sites=2, between_sites=Link(1000, 0.03, 0.003)),
    "one_slow_link": Links(LINKS["lan"], workers=((0, LINKS["dsl"]),)),
}
"""Links of all workers by name: two halves with a link of their own for any two workers between
them; all within a building, but worker 0 at home."""

LinkLike: TypeAlias = Link | Links | str | Path | Sequence[Any] | Mapping[str, Any]
"""Values that :func:`as_links` converts."""


def as_links(value: LinkLike | None) -> Links | None:
    """Convert a user's description of links.

    Args:
        value: A name of :data:`LINKS` or :data:`NETWORKS`, a :class:`Link`, a list with a link or
            its name for each worker, a map as in :func:`read_links`, the path of such a file, or
            None.

    Raises:
        TypeError: If it is something else, or a number has the wrong type.
        ValueError: If a name is unknown, a value is out of range or a file is invalid.
        FileNotFoundError: If the file does not exist.

    Example:
        >>> links = as_links(["wan", "wan", Link(20)])
        >>> links.between(0, 2)
        Link(mbit_per_s=20, latency_s=0.03, jitter_s=0.003)
    """
    if value is None or isinstance(value, Links):
        return value
    if isinstance(value, str) and value in NETWORKS:
        return NETWORKS[value]
    if isinstance(value, Path) or (isinstance(value, str) and _is_path(value)):
        return read_links(value)
    if isinstance(value, Mapping) and not set(value) <= _FIELDS:
        return _from_map(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        links = [_as_link(entry, f"link[{index}]") for index, entry in enumerate(value)]
        if not links:
            raise ValueError("link is an empty list. Give one link for each worker, or None.")
        return Links(links[0], tuple(enumerate(links)), num_workers=len(links))
    return Links(_as_link(value, "link"))


def read_links(path: str | Path) -> Links:
    """Read links from a YAML or JSON file. All keys but ``default`` are optional::

        default: wan                                  # all workers that are not listed
        workers:
          3: dsl                                      # a name, or numbers:
          2: {mbit_per_s: 50, latency_s: 0.01, jitter_s: 0.001}
        pairs:
          0-1: lan                                    # in both directions
          1->2: {mbit_per_s: 10}                      # from worker 1 to worker 2
        sites: 2                                      # the first and the second half of the workers
        between_sites: wan                            # for any two workers at different sites
        seed: 0                                       # seed of the jitter

    The file may also hold a list with one link for each worker, or a single link for all.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it cannot be read or its content is invalid.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file of links {str(path)!r}. Pass the path of one, or one of "
            f"{', '.join((*LINKS, *NETWORKS))}."
        ) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The file of links {str(path)!r} cannot be read: {error}") from None
    try:
        if content is None or (isinstance(content, str) and content not in (*LINKS, *NETWORKS)):
            raise ValueError(f"there is no link in it, only {content!r}.")
        links = as_links(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    assert links is not None
    return links


_FIELDS = {field.name for field in dataclasses.fields(Link)}


def _is_path(text: str) -> bool:
    return text not in LINKS and (text.endswith(_SUFFIXES) or "/" in text)


def _as_link(value: object, where: str) -> Link:
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        if value not in LINKS:
            names = (*LINKS, *NETWORKS) if where == "link" else tuple(LINKS)
            close = difflib.get_close_matches(value, names, 1)
            instead = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{where} must be one of {', '.join(names)}, a Link(...) or the path of a .yaml or "
                f".json file, got {value!r}.{instead}"
            )
        return LINKS[value]
    if isinstance(value, Mapping):
        if unknown := sorted(set(map(str, value)) - _FIELDS):
            raise ValueError(f"{where} has no {unknown[0]!r}. Use {', '.join(sorted(_FIELDS))}.")
        if "mbit_per_s" not in value:
            raise ValueError(f"{where} needs mbit_per_s, got {dict(value)!r}.")
        return Link(**value)
    raise TypeError(
        f"{where} must be a name such as 'wan', a Link(...), a list with one for each worker or "
        f"the path of a file, got {value!r}."
    )


def _from_map(content: Mapping[str, Any]) -> Links:
    if unknown := sorted(set(map(str, content)) - set(_KEYS)):
        raise ValueError(f"link has no {unknown[0]!r}. Use {', '.join(_KEYS)}.")
    if "default" not in content:
        raise ValueError("link needs 'default': the link of all workers that are not listed.")
    parts = {key: content.get(key) or {} for key in ("workers", "pairs")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"link.{key} must be a map, got {part!r}.")
    workers = [
        (_worker_number(worker), _as_link(link, f"link.workers[{worker}]"))
        for worker, link in parts["workers"].items()
    ]
    pairs: list[tuple[int, int, Link]] = []
    for name, value in parts["pairs"].items():
        match = _PAIR.fullmatch(str(name))
        if not match or match[1] == match[3]:
            raise ValueError(f"link.pairs names two workers, as in 0-1 or 0->1, got {name!r}.")
        link = _as_link(value, f"link.pairs[{name}]")
        pairs.append((int(match[1]), int(match[3]), link))
        if match[2] == "-":
            pairs.append((int(match[3]), int(match[1]), link))
    default = _as_link(content["default"], "link.default")
    between = content.get("between_sites")
    return Links(
        default,
        tuple(workers),
        tuple(pairs),
        content.get("seed", 0),
        sites=content.get("sites", 1),
        between_sites=None if between is None else _as_link(between, "link.between_sites"),
    )


def _worker_number(worker: object) -> int:
    if not re.fullmatch(r"\d+", str(worker)):
        raise ValueError(f"link.workers needs the workers' numbers from 0 on, got {worker!r}.")
    return int(str(worker))


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
    """What :class:`TransferTime` is, for all workers at once.

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
        latency_s: Latency without jitter.
        jitter_s: Largest additional delay.
        is_shared: Whether the message shares the links of sender and receiver with others, and has
            no link of its own.
    """

    mbit_per_s: Array
    latency_s: Array
    jitter_s: Array
    is_shared: NDArray[np.bool_]

    def seconds(self, num_bytes: float) -> Array:
        """Return how long sending ``num_bytes`` takes, without the latency."""
        return 8e-6 * num_bytes / self.mbit_per_s


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    r"""How long exchanges of ``num_workers`` workers take on their links.

    The link of a worker carries both directions at once. All messages that the worker sends in a
    round share it, and so do all that it receives. The link of a pair is not shared. The jitter of
    a worker's messages in a round is drawn from the seed, the round and the worker, so all workers
    compute the same.

    Args:
        links: Links of the workers.
        num_workers: Number of workers N.

    Example:
        >>> times = LinkTimes(Links(Link(mbit_per_s=80, latency_s=0.01)), num_workers=2)
        >>> times.mean(1_000_000, hops=2, round_index=0)
        TransferTime(busy_s=0.1, latency_s=0.02)
    """

    links: Links
    num_workers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", self.links.of_size(self.num_workers))

    def mean(self, num_bytes: float, hops: int, round_index: int) -> TransferTime:
        r"""Return the time of a collective of all workers; the slowest link determines it.

        Each worker sends to the next one, as in a ring all-reduce, which sends
        :math:`2 (N - 1) / N` of the message through each link in :math:`2 (N - 1)` hops.

        Args:
            num_bytes: Bytes that each worker sends.
            hops: Number of messages in sequence, each of which adds a latency.
            round_index: Index of the round, for the jitter.
        """
        return self.mean_of(range(self.num_workers), num_bytes, hops, round_index)

    def mean_of(
        self, workers: Sequence[int], num_bytes: float, hops: int, round_index: int
    ) -> TransferTime:
        """Return the time of a collective of some workers; as :meth:`mean` otherwise."""
        if len(workers) < 2:
            return TransferTime(0.0, 0.0)
        senders = np.asarray(workers)
        route = self.route(senders, np.roll(senders, -1))
        latency_s = self.latency_s(senders, route, round_index)
        return TransferTime(float(route.seconds(num_bytes).max()), hops * float(latency_s.max()))

    def neighbors(
        self, worker: int, num_bytes: float, topology: Topology, round_index: int
    ) -> TransferTime:
        """Return the time until a worker has the messages of its neighbors in a topology.

        A message has ``num_bytes``; ``round_index`` is for the topology and the jitter.
        """
        n = self.num_workers
        row = topology.weights(worker, n, round_index)
        pairs = [
            (sender, receiver)
            for sender in {worker, *row}
            for receiver in topology.receivers(sender, n, round_index)
        ]
        senders, receivers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return self._messages(senders, receivers, num_bytes, round_index).of_worker(worker)

    def all_neighbors(
        self,
        num_bytes: float,
        topology: Topology,
        round_index: int,
        workers: Sequence[int] | None = None,
    ) -> TransferTimes:
        """Return what :meth:`neighbors` returns for each worker, much faster for many of them.

        ``workers`` are those that take part, in the order of the topology. Default: all.
        """
        count = self.num_workers if workers is None else len(workers)
        senders, receivers = messages_of(topology, count, round_index)
        if workers is not None:
            senders, receivers = np.asarray(workers)[senders], np.asarray(workers)[receivers]
        return self._messages(senders, receivers, num_bytes, round_index)

    def fetch(self, worker: int, peer: int, num_bytes: float, count: int) -> TransferTime:
        """Return the time of a request to a peer and its reply of ``num_bytes``.

        ``count`` is the number of this worker's fetch, for the jitter.
        """
        senders = np.array([worker, peer])
        route = self.route(senders, senders[::-1])
        latency_s = float(self.latency_s(senders, route, count).sum())
        return TransferTime(float(route.seconds(num_bytes)[1]), latency_s)

    def _messages(
        self, senders: Indices, receivers: Indices, num_bytes: float, round_index: int
    ) -> TransferTimes:
        """Return the times of messages, by worker: until it has received and sent its own.

        Those of a worker are right if ``senders`` and ``receivers`` have all messages to it and
        from it, and all messages of those that send to it.
        """
        n, route = self.num_workers, self.route(senders, receivers)
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

    @functools.cached_property
    def own(self) -> Array:
        """The links of the workers: bandwidth, latency, jitter; ``(N, 3)``."""
        own = np.tile(np.array(dataclasses.astuple(self.links.default)), (self.num_workers, 1))
        for worker, link in self.links.workers:
            own[worker] = dataclasses.astuple(link)
        return own.astype(np.float64)

    def route(self, senders: Indices, receivers: Indices) -> Route:
        """Return the links that messages pass through."""
        links, first, second = self.links, self.own[senders], self.own[receivers]
        found = np.maximum(first, second)
        found[:, 0] = np.minimum(first[:, 0], second[:, 0])
        is_shared = np.ones(len(found), dtype=bool)
        if links.between_sites is not None:
            n = self.num_workers
            is_shared = senders * links.sites // n == receivers * links.sites // n
            found[~is_shared] = dataclasses.astuple(links.between_sites)
        for index, pair in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
            if not links.pairs:
                break
            if (link := links.of_pair(*pair)) is not None:
                found[index], is_shared[index] = dataclasses.astuple(link), False
        return Route(found[:, 0], found[:, 1], found[:, 2], is_shared)

    def latency_s(self, senders: Indices, route: Route, index: int) -> Array:
        """Return the latency of messages, with the jitter of round ``index``."""
        if not route.jitter_s.any():
            return route.latency_s
        draws = draw(self.links.seed, index, self.num_workers)
        return route.latency_s + route.jitter_s * draws[senders]


@functools.lru_cache(maxsize=256)
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
