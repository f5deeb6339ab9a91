"""Emulated network links of workers: bandwidth, latency, jitter, and how long messages take."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml  # type: ignore[import-untyped]

from lightning_loco.topology import Topology

_KEYS = ("default", "workers", "pairs", "seed")
_PAIR = re.compile(r"\s*(\d+)\s*(-|->)\s*(\d+)\s*")
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Link:
    r"""The network link of a worker, to be emulated on machines with a faster network.

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

    Raises:
        TypeError: If the seed is not an integer.
    """

    default: Link
    workers: tuple[tuple[int, Link], ...] = ()
    pairs: tuple[tuple[int, int, Link], ...] = ()
    seed: int = 0
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed of the links must be an integer, got {self.seed!r}.")

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

    def of_worker(self, worker: int) -> Link:
        """Return the link of a worker, for messages to and from all others."""
        return dict(self.workers).get(worker, self.default)

    def of_pair(self, sender: int, receiver: int) -> Link | None:
        """Return the link that only messages between these two use, or None."""
        return {(first, second): link for first, second, link in self.pairs}.get((sender, receiver))

    def between(self, sender: int, receiver: int) -> Link:
        """Return the link that a message between these two passes through."""
        pair_link = self.of_pair(sender, receiver)
        return pair_link or self.of_worker(sender).slower(self.of_worker(receiver))


LinkLike: TypeAlias = Link | Links | str | Path | Sequence[Any] | Mapping[str, Any]
"""Values that :func:`as_links` converts."""


def as_links(value: LinkLike | None) -> Links | None:
    """Convert a user's description of links.

    Args:
        value: A name (``"wan"``, ``"dsl"``, ``"lan"``, ``"datacentre"``), a :class:`Link`, a list
            with one of these for each worker, a map as in :func:`read_links`, the path of such a
            file, or None.

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
            f"{', '.join(LINKS)}."
        ) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The file of links {str(path)!r} cannot be read: {error}") from None
    try:
        if content is None or (isinstance(content, str) and content not in LINKS):
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
            raise ValueError(
                f"{where} must be one of {', '.join(LINKS)}, a Link(...) or the path of a .yaml or "
                f".json file, got {value!r}."
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
    return Links(default, tuple(workers), tuple(pairs), content.get("seed", 0))


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

    def mean(self, num_bytes: float, hops: int, round_index: int) -> TransferTime:
        r"""Return the time of a collective of all workers; the slowest link determines it.

        Each worker sends to the next one, as in a ring all-reduce, which sends
        :math:`2 (N - 1) / N` of the message through each link in :math:`2 (N - 1)` hops.

        Args:
            num_bytes: Bytes that each worker sends.
            hops: Number of messages in sequence, each of which adds a latency.
            round_index: Index of the round, for the jitter.
        """
        n = self.num_workers
        if n == 1:
            return TransferTime(0.0, 0.0)
        ring = [(worker, (worker + 1) % n) for worker in range(n)]
        busy_s = max(self.links.between(*pair).seconds(num_bytes) for pair in ring)
        return TransferTime(busy_s, hops * self._longest_latency(ring, round_index))

    def neighbors(
        self, worker: int, num_bytes: float, topology: Topology, round_index: int
    ) -> TransferTime:
        """Return the time until a worker has the messages of its neighbors in a topology.

        A message has ``num_bytes``; ``round_index`` is for the topology and the jitter.
        """
        links, n = self.links, self.num_workers

        def sent_by(sender: int) -> list[tuple[int, int]]:
            return [(sender, other) for other in topology.receivers(sender, n, round_index)]

        def count_shared(pairs: Iterable[tuple[int, int]]) -> int:
            return sum(links.of_pair(*pair) is None for pair in pairs)

        senders = [other for other in topology.weights(worker, n, round_index) if other != worker]
        received = [(sender, worker) for sender in senders]
        sent = sent_by(worker)
        num_shared = max(count_shared(received), count_shared(sent))
        busy = [links.of_worker(worker).seconds(num_bytes * num_shared)]
        for pair in (*received, *sent):
            if (pair_link := links.of_pair(*pair)) is not None:
                busy.append(pair_link.seconds(num_bytes))
        for sender, _ in received:
            if links.of_pair(sender, worker) is None:
                num_shared = count_shared(sent_by(sender))
                busy.append(links.of_worker(sender).seconds(num_bytes * num_shared))
        return TransferTime(max(busy), self._longest_latency(received, round_index))

    def fetch(self, worker: int, peer: int, num_bytes: float, count: int) -> TransferTime:
        """Return the time of a request to a peer and its reply of ``num_bytes``.

        ``count`` is the number of this worker's fetch, for the jitter.
        """
        request, reply = (worker, peer), (peer, worker)
        latency_s = self._longest_latency([request], count) + self._longest_latency([reply], count)
        return TransferTime(self.links.between(*reply).seconds(num_bytes), latency_s)

    def _longest_latency(self, pairs: Iterable[tuple[int, int]], index: int) -> float:
        """Return the longest latency, with jitter, of messages between pairs."""
        longest_s = 0.0
        for sender, receiver in pairs:
            link = self.links.between(sender, receiver)
            jitter_s = link.jitter_s and link.jitter_s * self._draw(sender, index)
            longest_s = max(longest_s, link.latency_s + jitter_s)
        return longest_s

    def _draw(self, sender: int, index: int) -> float:
        return random.Random(f"{self.links.seed} {index} {sender}").random()
