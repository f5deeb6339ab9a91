"""Where the peers are: looked up in the job's key-value store, or named in a list."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from torch.distributed import Store

from lightning_loco.distributed.store import TimeoutStore, publish

_ENTRY = re.compile(r"(\d{1,5}) ([\w.:%-]{1,253})", re.ASCII)
_LONGEST_ENTRY = 300


class Peer(NamedTuple):
    """A worker that serves its parameters.

    Attributes:
        name: Its name, different from all others.
        host: Name or address at which others reach it.
        port: The port there, 1 to 65535.
    """

    name: str
    host: str
    port: int


class Directory(Protocol):
    """Who the other peers are and where they listen; used by one thread at a time."""

    @property
    def names(self) -> list[str]:
        """Names of the other peers."""
        ...

    @property
    def port(self) -> int | None:
        """The port at which the others expect this worker; None if any will do."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all peers are on this machine."""
        ...

    def announce(self, port: int) -> None:
        """Tell the others at which port this worker listens."""
        ...

    def find(self, name: str) -> Peer | None:
        """Where a peer listens, or None while nobody knows."""
        ...

    def forget(self, name: str) -> None:
        """Look again the next time: the peer did not answer where it was."""
        ...


class StoreDirectory:
    """Peers that belong to one job and find each other in its key-value store.

    Args:
        store: A connection to the store that no other thread uses at the same time.
        worker: Number of this worker, 0 to N - 1.
        num_workers: Number of workers N.
        host: Name or address at which the other workers reach this one; see
            :func:`address_towards`.

    Raises:
        ValueError: If there is no such worker.
    """

    port = None

    def __init__(
        self, store: Store | TimeoutStore, worker: int, num_workers: int, host: str = "127.0.0.1"
    ) -> None:
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker must be 0 to {num_workers - 1}, got {worker}.")
        self._store = store
        self._own = worker_name(worker)
        self._host = host
        self._names = [worker_name(other) for other in range(num_workers) if other != worker]
        self._known: dict[str, Peer] = {}
        self._outdated: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Names of the other workers."""
        return list(self._names)

    @property
    def is_local(self) -> bool:
        """Whether this worker is reached at its own machine only, and so all others too."""
        return is_loopback(self._host)

    def announce(self, port: int) -> None:
        """Write host and port to the store; a restarted worker overwrites what was there."""
        publish(self._store, f"peer/{self._own}", f"{port} {self._host}")

    def find(self, name: str) -> Peer | None:
        """Look into the store, once; it is asked again after :meth:`forget`."""
        if name not in self._known or name in self._outdated:
            key = f"peer/{name}"
            with suppress(RuntimeError):  # a store that is silent: the address that was known
                if self._store.check([key]):
                    found = _ENTRY.fullmatch(self._store.get(key)[:_LONGEST_ENTRY].decode("latin"))
                    if found is not None and 1 <= int(found[1]) <= 65535:
                        self._known[name] = Peer(name, found[2], int(found[1]))
            self._outdated.discard(name)
        return self._known.get(name)

    def forget(self, name: str) -> None:
        """Ask the store again the next time."""
        self._outdated.add(name)


class NodeDirectory:
    """Peers named in a list, so that they may be started one by one on several machines.

    Args:
        nodes: All peers, this one among them: :class:`Peer` or mappings with name, host and port.
        name: Name of this peer.

    Raises:
        ValueError: If a name is missing, doubled or unknown, or a port is out of range.
        TypeError: If an entry is of another kind.

    Example:
        >>> nodes = [Peer("a", "localhost", 4001), {"name": "b", "host": "localhost", "port": 4002}]
        >>> directory = NodeDirectory(nodes, "b")
        >>> directory.names, directory.port, directory.is_local
        (['a'], 4002, True)
    """

    def __init__(self, nodes: Sequence[Peer | Mapping[str, object]], name: str) -> None:
        peers = [as_peer(node) for node in nodes]
        self._all = peers
        self._peers = {peer.name: peer for peer in peers}
        names = [peer.name for peer in peers]
        doubled = sorted({other for other in names if names.count(other) > 1})
        if doubled:
            raise ValueError(
                f"The nodes have doubled names: {', '.join(doubled)}. Give each its own name."
            )
        if name not in self._peers:
            raise ValueError(
                f"There is no node {name!r} in the list, only {', '.join(names) or 'nothing'}. "
                "Pass the name of this worker, or add it to the nodes."
            )
        self._own = self._peers.pop(name)

    @property
    def names(self) -> list[str]:
        """Names of the other peers."""
        return list(self._peers)

    @property
    def nodes(self) -> list[Peer]:
        """All peers in the order of the list, this one among them."""
        return list(self._all)

    @property
    def port(self) -> int:
        """This peer's own port."""
        return self._own.port

    @property
    def is_local(self) -> bool:
        """Whether all hosts are this machine's loopback."""
        return all(is_loopback(peer.host) for peer in (self._own, *self._peers.values()))

    def announce(self, port: int) -> None:
        """Nothing to do: the others have the same list."""

    def find(self, name: str) -> Peer | None:
        """Look into the list."""
        return self._peers.get(name)

    def forget(self, name: str) -> None:
        """Nothing to do: a list stays as it is."""


def as_peer(node: Peer | Mapping[str, object]) -> Peer:
    """Check one entry of a list of nodes.

    Raises:
        ValueError: If name or host is missing, the port is out of range, or a key is unknown.
        TypeError: If it is no mapping.
    """
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


def address_towards(host: str) -> str:
    """The address of this machine on the network that leads to ``host``, without sending anything.

    Example:
        >>> address_towards("127.0.0.1")
        '127.0.0.1'
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether a host can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def worker_name(worker: int) -> str:
    """What a rank of a job is called among its peers."""
    return f"worker{worker}"
