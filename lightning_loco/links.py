"""Network links between workers, as they are emulated: bandwidth, latency and jitter."""

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
    r"""What connects a worker with the others, to be emulated on machines that are closer together.

    A message of B bytes takes :math:`8 B / (10^6\,` ``mbit_per_s`` :math:`)` seconds to leave and
    ``latency_s`` to reach the other end, up to ``jitter_s`` more by chance.

    Args:
        mbit_per_s: Megabits (a million bits) per second, in each direction; ``math.inf`` for no
            limit.
        latency_s: From one end to the other, one way, in seconds.
        jitter_s: The most by which a message is later than that, in seconds.

    Raises:
        TypeError: If a value is no number.
        ValueError: If a value is out of range.

    Example:
        >>> Link(mbit_per_s=100, latency_s=0.03).seconds(1_000_000)
        0.08
    """

    mbit_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Check types and ranges."""
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
        """How long so many bytes take to leave."""
        return 8e-6 * num_bytes / self.mbit_per_s

    def slower(self, other: Link) -> Link:
        """What a message meets that passes through both: the worse of each."""
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
"""Links by name: between two sites, from a home, within a building, within a rack."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Which link each message passes through.

    Args:
        default: Of every worker that is not named.
        workers: A worker's number and its link.
        pairs: Who sends, who receives, and a link between these two that nobody shares.
        seed: Of the jitter.
        num_workers: How many workers there must be; None for any number.

    Raises:
        TypeError: If the seed is no integer.
    """

    default: Link
    workers: tuple[tuple[int, Link], ...] = ()
    pairs: tuple[tuple[int, int, Link], ...] = ()
    seed: int = 0
    num_workers: int | None = None

    def __post_init__(self) -> None:
        """Check the seed."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed of the links must be an integer, got {self.seed!r}.")

    def check(self, num_workers: int) -> None:
        """Raise ValueError if they are not those of so many workers."""
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

    def of(self, worker: int) -> Link:
        """What connects a worker with all others."""
        return dict(self.workers).get(worker, self.default)

    def own(self, sender: int, receiver: int) -> Link | None:
        """What connects these two alone, if anything does."""
        return {(first, second): link for first, second, link in self.pairs}.get((sender, receiver))

    def between(self, sender: int, receiver: int) -> Link:
        """What a message meets on its way."""
        return self.own(sender, receiver) or self.of(sender).slower(self.of(receiver))


LinkLike: TypeAlias = Link | Links | str | Path | Sequence[Any] | Mapping[str, Any]
"""What :func:`as_links` understands."""


def as_links(value: LinkLike | None) -> Links | None:
    """The links that a user means.

    Args:
        value: A name (``"wan"``, ``"dsl"``, ``"lan"``, ``"datacentre"``), a :class:`Link`, a list
            with one of these for each worker, a map as in :func:`read_links`, the path of such a
            file, or None.

    Raises:
        TypeError: If it is something else, or a number has the wrong type.
        ValueError: If a name is unknown, a value out of range or a file not understood.
        FileNotFoundError: If there is no such file.

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
    """Read a YAML or JSON file like this one; all keys but ``default`` may be missing::

        default: wan                                  # of all workers that are not named
        workers:
          3: dsl                                      # a name, or numbers:
          2: {mbit_per_s: 50, latency_s: 0.01, jitter_s: 0.001}
        pairs:
          0-1: lan                                    # both ways
          1->2: {mbit_per_s: 10}                      # from worker 1 to worker 2
        seed: 0                                       # of the jitter

    A list has one link for each worker; a name alone, or numbers, are for all.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read or says something that is not understood.
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
        raise ValueError("link needs 'default': the link of all workers that are not named.")
    parts = {key: content.get(key) or {} for key in ("workers", "pairs")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"link.{key} is a map, got {part!r}.")
    workers = [
        (_number(worker), _as_link(link, f"link.workers[{worker}]"))
        for worker, link in parts["workers"].items()
    ]
    pairs: list[tuple[int, int, Link]] = []
    for name, value in parts["pairs"].items():
        found = _PAIR.fullmatch(str(name))
        if not found or found[1] == found[3]:
            raise ValueError(f"link.pairs names two workers, as in 0-1 or 0->1, got {name!r}.")
        link = _as_link(value, f"link.pairs[{name}]")
        pairs.append((int(found[1]), int(found[3]), link))
        if found[2] == "-":
            pairs.append((int(found[3]), int(found[1]), link))
    default = _as_link(content["default"], "link.default")
    return Links(default, tuple(workers), tuple(pairs), content.get("seed", 0))


def _number(worker: object) -> int:
    if not re.fullmatch(r"\d+", str(worker)):
        raise ValueError(f"link.workers has the workers' numbers from 0 on, got {worker!r}.")
    return int(str(worker))


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
