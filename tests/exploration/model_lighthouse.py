"""A model of torchft's lighthouse: which workers are in a quorum, and when they learn of it.

:class:`Quorums` computes as the server of torchft 0.2.0 does (``quorum_compute`` in its
``lighthouse.rs``), and is compared with answers of a real one: ``test_model_lighthouse.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.exploration.model_network import Network

HOST = "lighthouse"
ADDRESS = f"{HOST}:29510"


class Request(NamedTuple):
    """A worker that asks to take part, since some time."""

    joined_s: float
    data: Any


class Quorums:
    """The state of a lighthouse; times are in seconds."""

    def __init__(self, min_replicas: int, join_timeout_s: float, heartbeat_timeout_s: float):
        self.heartbeats: dict[str, float] = {}
        self.requests: dict[str, Request] = {}
        self.quorum_id = 0
        self._previous: tuple[str, ...] | None = None
        self._min_replicas = min_replicas
        self._join_timeout_s = join_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s

    def ask(self, name: str, data: Any, now: float) -> None:
        """Let a worker ask to take part."""
        self.heartbeats[name] = now  # a request is a heartbeat, too
        self.requests[name] = Request(now, data)

    def compute(self, now: float) -> list[str] | None:
        """The members of the quorum that is complete now; None if there is none."""
        timeout_s = self._heartbeat_timeout_s
        healthy = {name for name, seen in self.heartbeats.items() if now - seen < timeout_s}
        ready = sorted(name for name in self.requests if name in healthy)
        # A fast quorum: all members of the one before ask again.
        if self._previous is not None and all(name in ready for name in self._previous):
            return ready
        if len(ready) < self._min_replicas or len(ready) <= len(healthy) // 2:
            return None
        joined_s = min((self.requests[name].joined_s for name in ready), default=now)
        if len(ready) < len(healthy) and now - joined_s < self._join_timeout_s:
            return None
        return ready

    def tick(self, now: float) -> list[tuple[str, Any]] | None:
        """Return the members of a new quorum with their data; None if there is none."""
        names = self.compute(now)
        if names is None:
            return None
        if self._previous != tuple(names):
            self.quorum_id += 1
        self._previous = tuple(names)
        members = [(name, self.requests[name].data) for name in names]
        self.requests.clear()
        return members


class Waiting:
    """A request over a connection, and its answer."""

    def __init__(self, name: str, host: str, data: Any) -> None:
        self.name, self.host, self.data = name, host, data
        self.answer: Any = None
        self.is_over = False


class Sender:
    """What sends the heartbeats of a worker, from some time on."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.since: float | None = None


class ModelLighthouse:
    """The lighthouse of a world: it may end and be started again.

    Args:
        network: What connects it with the workers.
        first_heartbeat_s: How long it takes until heartbeats come after a connection is possible.
        settings: Of :class:`Quorums`.
    """

    def __init__(self, network: Network, first_heartbeat_s: float, **settings: Any) -> None:
        self._network, self._settings = network, settings
        self._first_s = first_heartbeat_s
        self.epoch, self.is_up = 1, True
        self.num_quorums = 0
        self._quorums = Quorums(**settings)
        self._senders: list[Sender] = []
        self._waiting: list[Waiting] = []
        self._has_tick = False

    # ------------------------------------------------------------------------ faults

    def stop(self) -> None:
        """End its process: it forgets everything."""
        self.is_up = False
        self._quorums = Quorums(**self._settings)
        self._waiting.clear()
        self._network.ended.add(HOST)

    def start(self) -> None:
        """Start it again at the same address."""
        self.is_up = True
        self.epoch += 1
        self._network.ended.discard(HOST)

    # ------------------------------------------------------------------------- events

    def after_event(self) -> None:
        """Note heartbeats, and let the next quorum be formed if it is complete."""
        now, scheduler = self._network.scheduler.now, self._network.scheduler
        for sender in self._senders:
            is_seen = self._network.reaches(sender.host, HOST) and self.is_up
            if not is_seen or scheduler.is_frozen(sender.host):
                sender.since = None
                continue
            sender.since = now if sender.since is None else sender.since
            if now >= sender.since + self._first_s:
                self._quorums.heartbeats[sender.name] = now
        has_requests = bool(self._quorums.requests) and not self._has_tick
        if has_requests and self._quorums.compute(now) is not None:
            self._has_tick = True
            scheduler.post("lighthouse tick", self._tick, HOST)

    def forget(self, host: str) -> None:
        """The process of a host has ended."""
        self._senders = [sender for sender in self._senders if sender.host != host]
        self._waiting = [waiting for waiting in self._waiting if waiting.host != host]

    def _tick(self) -> None:
        self._has_tick = False
        now = self._network.scheduler.now
        members = self._quorums.tick(now)
        if members is None:
            return
        self.num_quorums += 1
        participants = [SimpleNamespace(replica_id=name, data=data) for name, data in members]
        created = SimpleNamespace(seconds=self.num_quorums, nanos=0)
        answer = SimpleNamespace(participants=participants, created=created)
        names = {name for name, _ in members}
        for waiting in list(self._waiting):
            if waiting.name in names:
                self._waiting.remove(waiting)

                def arrive(waiting: Waiting = waiting) -> None:
                    waiting.answer = answer

                self._network.send(f"quorum to {waiting.host}", HOST, waiting.host, arrive)
            else:  # as the server does, for a connection that is open
                self._quorums.requests[waiting.name] = Request(now, waiting.data)

    # -------------------------------------------------------- what the package calls

    def manager_server(self, *, replica_id: str, **_: Any) -> Any:
        """In place of ``ManagerServer``, which sends heartbeats."""
        sender = Sender(replica_id, self._network.scheduler.current.host)
        self._senders.append(sender)

        def shutdown() -> None:
            if sender in self._senders:
                self._senders.remove(sender)

        return SimpleNamespace(shutdown=shutdown)

    def client(self, url: str, timeout: timedelta) -> Client:
        """In place of ``LighthouseClient``."""
        return Client(self, self._network)

    def connection(self, source: str, address: str, timeout: float) -> Any:
        """In place of a TCP connection that ends with the lighthouse."""
        self._network.scheduler.wait(
            "the lighthouse", lambda: self._network.reaches(source, HOST), timeout
        )
        if not self._network.reaches(source, HOST):
            raise TimeoutError("timed out")
        if not self.is_up:
            raise ConnectionRefusedError("Connection refused")
        return Connection(self, self._network, source)

    def give_up(self, waiting: Waiting) -> None:
        """The connection of a request has ended; the request itself is not forgotten."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def request(self, waiting: Waiting, epoch: int) -> None:
        """Receive a request over a connection to the lighthouse as it was in an ``epoch``."""
        if self.is_up and epoch == self.epoch and not waiting.is_over:
            self._waiting.append(waiting)
            self._quorums.ask(waiting.name, waiting.data, self._network.scheduler.now)


class Client:
    """In place of ``LighthouseClient``."""

    def __init__(self, lighthouse: ModelLighthouse, network: Network) -> None:
        self._lighthouse, self._network = lighthouse, network

    def quorum(self, name: str, timeout: timedelta, data: Any) -> Any:
        """Ask for a quorum: TimeoutError if it is late, RuntimeError if the connection ends."""
        lighthouse, network = self._lighthouse, self._network
        waiting = Waiting(name, network.scheduler.current.host, data)
        network.scheduler.wait("the lighthouse")
        epoch = lighthouse.epoch

        def is_lost() -> bool:
            is_other = not lighthouse.is_up or lighthouse.epoch != epoch
            return is_other and network.reaches(waiting.host, HOST)

        if is_lost():
            raise RuntimeError("tcp connect error: Connection refused")
        network.send(
            f"request of {waiting.host}",
            waiting.host,
            HOST,
            lambda: lighthouse.request(waiting, epoch),
        )
        is_over: Callable[[], bool] = lambda: waiting.answer is not None or is_lost()  # noqa: E731
        network.scheduler.wait("a quorum", is_over, timeout.total_seconds())
        waiting.is_over = True
        if waiting.answer is not None:
            return waiting.answer
        lighthouse.give_up(waiting)
        if is_lost():
            raise RuntimeError("transport error")
        raise TimeoutError("the quorum is late")


class Connection:
    """A TCP connection to the lighthouse, on which nothing is sent."""

    def __init__(self, lighthouse: ModelLighthouse, network: Network, host: str) -> None:
        self._lighthouse, self._network, self._host = lighthouse, network, host
        self._epoch = lighthouse.epoch

    def setsockopt(self, *_: int) -> None:
        """Do nothing."""

    def setblocking(self, _: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def recv(self, *_: int) -> bytes:
        """Return nothing once the lighthouse has ended: BlockingIOError before."""
        lighthouse = self._lighthouse
        has_ended = not lighthouse.is_up or lighthouse.epoch != self._epoch
        if has_ended and self._network.reaches(self._host, HOST):
            return b""
        raise BlockingIOError
