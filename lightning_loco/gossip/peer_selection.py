"""Finds the peers and their addresses, and chooses the next one to read from.

:class:`StoreDiscovery` finds the ranks of a job in its key-value store, :class:`NodeListDiscovery`
takes the nodes of a user's list. :class:`PeerSelector` chooses among them.
"""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from torch.distributed import Store

from lightning_loco.distributed.store import TimeoutStore, publish

# ---------------------------------------------------------------------------- peer discovery

_ENTRY = re.compile(r"(\d{1,5}) ([\w.:%-]{1,253})", re.ASCII)
_MAX_ENTRY_BYTES = 300


class Peer(NamedTuple):
    """A worker that serves its parameters.

    Attributes:
        name: Its name, different from all others.
        host: Host name or address at which other workers reach it.
        port: Its port, 1 to 65535.
    """

    name: str
    host: str
    port: int


class PeerDiscovery(Protocol):
    """Names and addresses of the other peers. Used by one thread at a time."""

    @property
    def names(self) -> list[str]:
        """Names of the other peers."""
        ...

    @property
    def port(self) -> int | None:
        """Port at which the others expect this worker; None for any free one."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all peers are on this machine."""
        ...

    def announce(self, port: int) -> None:
        """Publish the port on which this worker listens."""
        ...

    def find(self, name: str) -> Peer | None:
        """Return a peer with its address; None if that is not known yet."""
        ...

    def forget(self, name: str) -> None:
        """Look a peer up again the next time, because it did not answer at its last address."""
        ...


class StoreDiscovery:
    """Finds the workers of one job in its key-value store.

    Args:
        store: A connection to the store that no other thread uses at the same time.
        worker: Number of this worker, 0 to N - 1.
        num_workers: Number of workers N.
        host: Host name or address at which the other workers reach this one; see
            :func:`lightning_loco.transport.address_towards`.

    Raises:
        ValueError: If ``worker`` is out of range.
    """

    port = None

    def __init__(
        self, store: Store | TimeoutStore, worker: int, num_workers: int, host: str = "127.0.0.1"
    ) -> None:
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker must be 0 to {num_workers - 1}, got {worker}.")
        self._store = store
        self._own_name = worker_name(worker)
        self._host = host
        self._names = [worker_name(other) for other in range(num_workers) if other != worker]
        self._found: dict[str, Peer] = {}
        self._outdated: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Names of the other workers."""
        return list(self._names)

    @property
    def is_local(self) -> bool:
        """Whether this worker can be reached only from its own machine."""
        return is_loopback(self._host)

    def announce(self, port: int) -> None:
        """Write host and port to the store. A restarted worker overwrites its old entry."""
        publish(self._store, f"peer/{self._own_name}", f"{port} {self._host}")

    def find(self, name: str) -> Peer | None:
        """Look a peer up in the store, once; again only after :meth:`forget`."""
        if name not in self._found or name in self._outdated:
            key = f"peer/{name}"
            with suppress(RuntimeError):  # the store does not answer: keep the last address
                if self._store.check([key]):
                    entry = self._store.get(key)[:_MAX_ENTRY_BYTES].decode("latin")
                    match = _ENTRY.fullmatch(entry)
                    if match is not None and 1 <= int(match[1]) <= 65535:
                        self._found[name] = Peer(name, match[2], int(match[1]))
            # Asked once for each failure: the entry of a peer that is gone stays as it is.
            self._outdated.discard(name)
        return self._found.get(name)

    def forget(self, name: str) -> None:
        """Ask the store again the next time."""
        # The address stays known, for when the store does not answer either.
        self._outdated.add(name)


class NodeListDiscovery:
    """Takes the peers from a list, so that they can be started one by one on several machines.

    Args:
        nodes: All nodes including this one: :class:`Peer` or mappings with name, host and port.
        name: Name of this node.

    Attributes:
        is_local: Whether all hosts are loopback addresses.

    Raises:
        ValueError: If a name is missing, used twice or unknown, or a port is out of range.
        TypeError: If an entry is of another type.

    Example:
        >>> nodes = [Peer("a", "localhost", 4001), {"name": "b", "host": "localhost", "port": 4002}]
        >>> discovery = NodeListDiscovery(nodes, "b")
        >>> discovery.names, discovery.port, discovery.is_local
        (['a'], 4002, True)
    """

    def __init__(self, nodes: Sequence[Peer | Mapping[str, object]], name: str) -> None:
        self._peers = {peer.name: peer for peer in as_peers(nodes)}
        self.is_local = all(is_loopback(peer.host) for peer in self._peers.values())
        if name not in self._peers:
            raise ValueError(
                f"There is no node {name!r} in the list, only "
                f"{', '.join(self._peers) or 'nothing'}. Pass the name of this worker, or add it "
                "to the nodes."
            )
        self._own = self._peers.pop(name)

    @property
    def names(self) -> list[str]:
        """Names of the other nodes."""
        return list(self._peers)

    @property
    def port(self) -> int:
        """Port of this node."""
        return self._own.port

    def announce(self, port: int) -> None:
        """Do nothing: the other nodes have the same list."""

    def find(self, name: str) -> Peer | None:
        """Look a peer up in the list."""
        return self._peers.get(name)

    def forget(self, name: str) -> None:
        """Do nothing: the list does not change."""


def as_peers(nodes: Sequence[Peer | Mapping[str, object]]) -> list[Peer]:
    """Check a list of nodes: each a :class:`Peer`, or a mapping with name, host and port.

    ValueError if a name or host is missing, a name is used twice, a port is out of range, or a key
    is unknown; TypeError if an entry is something else.
    """
    peers = [_as_peer(node) for node in nodes]
    names = [peer.name for peer in peers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"Several nodes have the same name: {', '.join(repeated)}. Give each its own name."
        )
    return peers


def _as_peer(node: Peer | Mapping[str, object]) -> Peer:
    if isinstance(node, Peer):
        node = node._asdict()
    if not isinstance(node, Mapping):
        raise TypeError(f"A node is a mapping with name, host and port, got {node!r}.")
    entry = f"The node {dict(node)!r}"
    unknown = sorted(str(key) for key in set(node) - set(Peer._fields))
    if unknown:
        raise ValueError(f"{entry} has unknown keys: {', '.join(unknown)}. Use name, host, port.")
    for key in ("name", "host"):
        value = node.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{entry} needs a {key} (text). Add {key}: ...")
    port = node.get("port")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ValueError(f"{entry} needs a port in 1 to 65535. Add port: 45000, for example.")
    return Peer(str(node["name"]), str(node["host"]), port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback: ``localhost`` or an address such as 127.0.0.1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def worker_name(worker: int) -> str:
    """Return the name of a worker for the other workers of its job."""
    return f"worker{worker}"


# ---------------------------------------------------------------------------- peer selection


def peer_seed(seed: int, number: int) -> int:
    """Return the seed of the choice of peers of the worker with this number."""
    return 1_000_003 * seed + number  # a prime: neighbouring seeds share no worker's seed


MIN_SCORE = 10
MAX_SCORE = 1000
_SUCCESS_POINTS = 10
_FAILURE_POINTS = 100
_NOT_CHOSEN_POINTS = 1


class PeerSelector:
    """Chooses random peers; peers that have failed recently are chosen less often.

    Each peer has a score in [10, 1000], which starts at 1000. A success adds 10 points; a timeout
    or a refusal subtracts 100. The next peer is the one with the largest ``score + U``, where U is
    a random integer in [10, 1000].

    With these rules alone a peer at 10 would hardly ever be tried again, because its largest draw
    only equals the smallest draw of a peer at 1000. Therefore a peer gains one point whenever it
    could have been chosen and was not. After at most 990 choices it has caught up with the others,
    and the draws overlap long before that. A peer that stays dead loses 100 points each time it is
    tried, so it is tried in about one choice of a hundred.

    Args:
        names: Names of the peers.
        seed: Seed of the random draws.

    Example:
        >>> selector = PeerSelector(["a", "b"], seed=0)
        >>> for _ in range(20):
        ...     selector.record_failure("a")
        >>> selector.choose(), selector.scores
        ('b', {'a': 11, 'b': 1000})
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._scores = dict.fromkeys(names, MAX_SCORE)
        self._random = random.Random(seed)

    @property
    def scores(self) -> dict[str, int]:
        """A copy of the scores by name."""
        return dict(self._scores)

    def choose(self, exclude: Collection[str] = ()) -> str | None:
        """Choose a peer that is not excluded; None if there is none."""
        draws = {
            name: score + self._random.randint(MIN_SCORE, MAX_SCORE)
            for name, score in self._scores.items()
            if name not in exclude
        }
        if not draws:
            return None
        # Not the first of them: peers earlier in the list would be chosen more often.
        highest = max(draws.values())
        chosen = self._random.choice([name for name, draw in draws.items() if draw == highest])
        # Those that were excluded have just been tried.
        for name in draws:
            if name != chosen:
                self._add(name, _NOT_CHOSEN_POINTS)
        return chosen

    def record_success(self, name: str) -> None:
        """Record that a peer has sent its parameters."""
        self._add(name, _SUCCESS_POINTS)

    def record_failure(self, name: str) -> None:
        """Record that a peer did not answer, refused, or sent unusable parameters."""
        self._add(name, -_FAILURE_POINTS)

    def _add(self, name: str, points: int) -> None:
        score = self._scores[name] + points
        self._scores[name] = min(max(score, MIN_SCORE), MAX_SCORE)
