"""A network of hosts, and what runs over it: key-value stores, and process groups as gloo's.

A host is a process: it may be killed, be frozen, or be cut off from others. A killed one refuses
connections, a frozen one accepts them and does not answer, and to one behind a cut everything waits
until the cut has healed. Messages between two processes keep their order.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_loco.distributed.store import StoreTimeout
from tests.exploration.scheduler import Scheduler

T = TypeVar("T")


class Network:
    """Which hosts reach which, and the servers that listen.

    Attributes:
        scheduler: Runs the hosts' tasks.
        stores: Key-value stores by address.
        ended: Hosts whose process has ended.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.stores: dict[str, StoreServer] = {}
        self.ended: set[str] = set()
        self.groups: list[GlooGroup] = []
        self._cuts: set[frozenset[str]] = set()
        self._held: list[tuple[str, str, str, Callable[[], object]]] = []
        self._num_ports = 0

    # ------------------------------------------------------------------------- hosts

    def reaches(self, source: str, target: str) -> bool:
        """Whether packets pass between two hosts."""
        return frozenset((source, target)) not in self._cuts

    def answers(self, source: str, target: str) -> bool:
        """Whether a process on a host gets answers from another one."""
        scheduler = self.scheduler
        is_well = target not in self.ended and not scheduler.is_frozen(target)
        return is_well and self.reaches(source, target)

    def cut(self, source: str, target: str) -> None:
        """Let no packet pass between two hosts."""
        self._cuts.add(frozenset((source, target)))

    def heal(self) -> None:
        """End all cuts; what was sent meanwhile arrives."""
        self._cuts.clear()
        held, self._held = self._held, []
        for message in held:
            self.send(*message)

    @property
    def is_cut(self) -> bool:
        """Whether some hosts do not reach each other."""
        return bool(self._cuts)

    def end(self, host: str) -> None:
        """Let the process of a host end: its servers refuse, its connections close."""
        self.ended.add(host)
        for address in [a for a, store in self.stores.items() if store.host == host]:
            del self.stores[address]
        for group in [group for group in self.groups if group.host == host]:
            group.close()

    def send(self, name: str, source: str, target: str, arrive: Callable[[], object]) -> None:
        """Let something arrive at a host, at any later time at which it is reached."""

        def act() -> None:
            if self.reaches(source, target):
                arrive()
            else:
                self._held.append((name, source, target, arrive))

        self.scheduler.post(name, act, target)

    # ------------------------------------------------------------------------ stores

    def serve(self, host: str) -> StoreServer:
        """Serve a key-value store on a host."""
        self._num_ports += 1
        server = StoreServer(self, host, self._num_ports)
        self.stores[f"{host}:{server.port}"] = server
        return server

    def connect(self, host: str, port: int, timeout: timedelta, **_: Any) -> StoreClient:
        """In place of ``TCPStore``, for a client: RuntimeError if the server does not answer."""
        scheduler = self.scheduler
        own, address = scheduler.current.host, f"{host}:{port}"

        def is_there() -> bool:
            return address in self.stores and self.answers(own, host)

        if not scheduler.wait(f"the store of {host}", is_there, timeout.total_seconds()):
            raise RuntimeError(f"The client socket has timed out while connecting to {address}.")
        return StoreClient(self, own, self.stores[address])

    def socket_module(self, connect: Callable[[str, str, float], Any]) -> Any:
        """In place of the module ``socket``; ``connect`` is called with both hosts and a timeout.

        For the addresses of stores it may be :meth:`probe`.
        """

        def create_connection(address: tuple[str, int], timeout: float) -> Any:
            return connect(self.scheduler.current.host, f"{address[0]}:{address[1]}", timeout)

        names = ("SOL_SOCKET", "SO_KEEPALIVE", "MSG_PEEK", "gethostname")
        constants = {name: getattr(socket, name) for name in names}
        return SimpleNamespace(**constants, create_connection=create_connection)

    def probe(self, source: str, address: str, timeout: float) -> Any:
        """Connect to the port of a store: ConnectionRefusedError if its process has ended."""
        target = address.partition(":")[0]
        if not self.reaches(source, target):
            self.scheduler.wait(f"{target}", lambda: self.reaches(source, target), timeout)
        if not self.reaches(source, target):
            raise TimeoutError(f"{target} does not answer")
        if address not in self.stores:
            raise ConnectionRefusedError(f"{target} refuses")
        return SimpleNamespace(close=lambda: None)


class StoreServer:
    """A key-value store; also its own first client, as a ``TCPStore`` that is the master."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self.network, self.host, self.port = network, host, port
        self.data: dict[str, Any] = {}
        self.groups: dict[str, dict[int, GlooGroup]] = {}
        self.own_client = StoreClient(network, host, self)

    @property
    def is_gone(self) -> bool:
        """Whether nobody serves it any more."""
        return self.network.stores.get(f"{self.host}:{self.port}") is not self


class StoreClient:
    """A connection to a store.

    Attributes:
        is_cut: Whether something has reset this connection.
    """

    def __init__(self, network: Network, host: str, server: StoreServer) -> None:
        self.network, self.host, self.server = network, host, server
        self.is_cut = self.is_closed = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: every call has its own."""

    def call(self, work: Callable[[dict[str, Any]], T], timeout_s: float) -> T:
        """Let the server do something, and wait for its answer."""
        server = self.server

        def is_over() -> bool:
            has_failed = self.is_closed or self.is_cut or server.is_gone
            return has_failed or self.network.answers(self.host, server.host)

        self.network.scheduler.wait(f"the store of {server.host}", is_over, timeout_s)
        if self.is_closed or not is_over():
            raise StoreTimeout(f"The store has not answered for {timeout_s:.0f} s.")
        self._raise_if_lost()
        return work(server.data)

    def post(self, key: str, value: Any) -> None:
        """Write a value without waiting for an answer."""
        server, network = self.server, self.network
        network.scheduler.wait(f"the store of {server.host}")
        self._raise_if_lost()
        if network.answers(self.host, server.host):
            server.data[key] = value
        else:
            name = f"set {key.partition('/')[2]} at {server.host}"
            network.send(name, self.host, server.host, lambda: server.data.__setitem__(key, value))

    def get(self, key: str) -> bytes:
        """Read a value."""
        return self.call(lambda data: data[key].encode(), 5.0)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self.call(lambda data: _add(data, key, amount), 5.0)

    def _raise_if_lost(self) -> None:
        if self.is_cut or self.server.is_gone:
            raise RuntimeError("Connection reset by peer")


class TimeoutClient:
    """In place of ``TimeoutStore``."""

    def __init__(self, store: StoreServer | StoreClient | Prefixed, clock: Any = None) -> None:
        self._prefix = ""
        if isinstance(store, Prefixed):
            self._prefix, store = store.prefix, store.client
        self.client = store.own_client if isinstance(store, StoreServer) else store

    def set(self, key: str, value: str, timeout_s: float = 5.0) -> None:
        """Write a value without waiting for an answer."""
        self.client.post(self._prefix + key, value)

    def get(self, key: str, timeout_s: float = 5.0) -> bytes:
        """Read a value."""
        return self.client.call(lambda data: data[self._prefix + key].encode(), timeout_s)

    def check(self, keys: Sequence[str], timeout_s: float = 5.0) -> bool:
        """Whether all keys exist."""
        return self.client.call(
            lambda data: all(self._prefix + key in data for key in keys), timeout_s
        )

    def add(self, key: str, amount: int, timeout_s: float = 5.0) -> int:
        """Add to a counter."""
        return self.client.call(lambda data: _add(data, self._prefix + key, amount), timeout_s)

    def close(self) -> None:
        """End the connection; calls raise StoreTimeout."""
        self.client.is_closed = True


class Prefixed:
    """In place of ``PrefixStore``."""

    def __init__(self, prefix: str, client: StoreClient) -> None:
        self.prefix, self.client = f"{prefix}/", client


def _add(data: dict[str, Any], key: str, amount: int) -> int:
    data[key] = int(data.get(key, 0)) + amount
    return data[key]


# ------------------------------------------------------------------------- process groups


class GlooGroup:
    """In place of ``ProcessGroupGloo``: every member sends its data to every other one.

    If a member is lost, what it has sent before arrives or not, and each of the others finds out at
    another time. A collective that fails may have changed its tensor.
    """

    def __init__(self, network: Network, timeout: timedelta) -> None:
        self.network, self.host = network, network.scheduler.current.host
        self.peers: dict[int, GlooGroup] = {}
        self.is_closed = False
        self._timeout_s = timeout.total_seconds()
        self._rank = 0
        self._connected: set[int] = set()
        self._lost: set[int] = set()
        self._inbox: dict[tuple[int, Any], list[Tensor]] = {}
        self._num_collectives = 0
        network.groups.append(self)

    def configure(self, store: str, name: str, rank: int, size: int) -> None:
        """Connect with all others; RuntimeError if one does not come."""
        network, scheduler = self.network, self.network.scheduler
        address, _, group = store.partition("/")
        client = network.connect(*_split(address), timedelta(seconds=self._timeout_s))
        self._rank = rank
        self.peers = client.server.groups.setdefault(group, {})
        self.peers[rank] = self

        def is_connected() -> bool:
            for other in [r for r in range(size) if r != rank and r not in self._connected]:
                peer = self.peers.get(other)
                if peer and not peer.is_closed and network.answers(self.host, peer.host):
                    self._connected.add(other)
            return len(self._connected) == size - 1 or self.is_closed

        scheduler.wait("the members of a new group", is_connected, self._timeout_s)
        if self.is_closed or not is_connected():
            raise RuntimeError("Gloo connectFullMesh failed: timed out")

    def size(self) -> int:
        """Number of members."""
        return len(self.peers)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        """Sum a tensor in place."""
        (tensor,) = tensors

        def finish(parts: dict[int, Tensor], is_complete: bool) -> None:
            own = tensor.clone()
            tensor.zero_()  # summed in the same order by all
            for rank in sorted({*parts, self._rank}):
                tensor.add_(own if rank == self._rank else parts[rank])

        return self._collective(tensor, finish)

    def allgather(self, tables: list[list[Tensor]], rows: list[Tensor], options: Any) -> Work:
        """Gather a row of each member."""
        (table,), (row,) = tables, rows

        def finish(parts: dict[int, Tensor], is_complete: bool) -> None:
            for rank in range(self.size()):
                if rank == self._rank or rank in parts:
                    table[rank].copy_(row if rank == self._rank else parts[rank])

        return self._collective(row, finish)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """Send a tensor to one member."""
        self._post(to, tag, tensors[0])
        return Work(self, {}, lambda parts, is_complete: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor of one member."""

        def finish(parts: dict[int, Tensor], is_complete: bool) -> None:
            if is_complete:
                tensors[0].copy_(parts[source])

        return Work(self, {source: tag}, finish)

    def abort(self, errored: bool = False) -> None:
        """Close all connections."""
        self.close()

    def close(self) -> None:
        """Close all connections: the others find out later."""
        if self.is_closed:
            return
        self.is_closed = True
        for _, peer in sorted(self.peers.items()):
            if peer is not self and not peer.is_closed:
                name = f"close {self.host}>{peer.host}"
                self.network.send(name, self.host, peer.host, lambda peer=peer: peer.lose(self))

    def lose(self, peer: GlooGroup) -> None:
        """Find that the connection with a member is closed; what has not arrived never does."""
        self._lost.add(peer._rank)

    def _collective(
        self, tensor: Tensor, finish: Callable[[dict[int, Tensor], bool], None]
    ) -> Work:
        self._num_collectives += 1
        tag = ("collective", self._num_collectives)
        others = [rank for rank in sorted(self.peers) if rank != self._rank]
        for rank in others:
            self._post(rank, tag, tensor)
        return Work(self, dict.fromkeys(others, tag), finish)

    def _post(self, to: int, tag: Any, tensor: Tensor) -> None:
        peer, sent = self.peers[to], tensor.detach().clone()

        def arrive() -> None:
            if self._rank not in peer._lost and not peer.is_closed:
                peer._inbox.setdefault((self._rank, tag), []).append(sent)

        if not self.is_closed and to not in self._lost:
            self.network.send(f"data {self.host}>{peer.host}", self.host, peer.host, arrive)


class Work:
    """In place of ``torch.distributed.Work``; ``needs`` has the tag of each message it needs."""

    def __init__(
        self,
        group: GlooGroup,
        needs: dict[int, Any],
        finish: Callable[[dict[int, Tensor], bool], None],
    ) -> None:
        self._group, self._needs, self._finish = group, needs, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until everything has arrived; RuntimeError if a member is lost."""
        group, inbox = self._group, self._group._inbox

        def missing() -> list[int]:
            return [rank for rank, tag in self._needs.items() if not inbox.get((rank, tag))]

        def is_over() -> bool:
            left = missing()
            return not left or group.is_closed or any(rank in group._lost for rank in left)

        limit_s = math.inf if timeout is None else timeout.total_seconds()
        if self._needs:
            names = ", ".join(group.peers[rank].host for rank in self._needs)
            group.network.scheduler.wait(f"data of {names}", is_over, limit_s)
        left = missing()
        with torch.no_grad():
            parts = {
                rank: inbox[rank, tag].pop(0)
                for rank, tag in self._needs.items()
                if rank not in left
            }
            self._finish(parts, not left)
        if left or group.is_closed:
            raise RuntimeError("Connection closed by peer, or timed out")
        return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
