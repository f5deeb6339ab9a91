"""The real classes of gossip, which also write down what they do, and a server that may lie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.fetch_decisions import Do, FetcherStopped
from lightning_loco.gossip.fetcher import Fetcher, Received
from lightning_loco.gossip.node import PeerNode
from lightning_loco.gossip.peer_selection import PeerSelector
from lightning_loco.gossip.protocol import (
    PARAMETERS,
    ModelId,
    ReplyHeader,
    WireFormat,
    pack_reply,
)
from lightning_loco.gossip.snapshot_server import SnapshotServer, answering
from lightning_loco.gossip.snapshots import Snapshot, Snapshots
from lightning_loco.transport import Request
from tests.exploration.records import (
    Blamed,
    Chosen,
    Closed,
    Exchanged,
    Fetched,
    FetchStarted,
    Overwritten,
    Published,
    Reset,
    Unpublished,
    Waited,
)

if TYPE_CHECKING:
    from tests.exploration.gossip_world import GossipWorld, Node

TICK_S = 0.1
"""How often an operation of a connection looks whether it is late."""


class Calm(NamedTuple):
    """From here on there are no faults, and what was broken is repaired."""


# ------------------------------------------------------------------------- replies that are wrong


def _with(header: dict[str, Any] | None = None, value: float | None = None, cut: int = 0) -> Any:
    def spoil(reply: ReplyHeader, body: bytes, wire_format: WireFormat) -> tuple[bytes, bytes]:
        if value is not None:
            flat = torch.full((wire_format.numel,), value, dtype=wire_format.dtype)
            codec = wire_format.codec
            body = (
                (flat.view(torch.uint8) if codec is None else codec.encode(flat)).numpy().tobytes()
            )
        return pack_reply(reply._replace(**(header or {}))), body[: len(body) - cut]

    return spoil


SPOILS: dict[str, Any] = {
    "nonsense": lambda reply, body, wire_format: (b"nonsense", body),
    "short": _with(cut=4),
    "clock": _with({"tag": Tag(math.nan, 1.0)}),
    "nan": _with(value=math.nan),
    "large": _with(value=1e6),
    "model": _with({"model_id": ModelId(1, 2)}, value=0.5),
    "twice": None,
    "silent": None,
    "broken": None,
}
"""How the next reply with parameters is wrong, by name."""


class LyingServer(SnapshotServer):
    """A server whose next reply may be wrong: see :data:`SPOILS`."""

    world: GossipWorld

    def __init__(self, wire_format: WireFormat, *args: Any, **settings: Any) -> None:
        self._host, self._format = self.world.scheduler.current.host, wire_format
        super().__init__(wire_format, *args, **settings)

    def _send_snapshot(self, request: Request) -> None:
        kind = self.world.spoils.get(self._host)
        if kind is None or self._snapshots.latest is None:
            super()._send_snapshot(request)
            return
        del self.world.spoils[self._host]
        content = request.header, request.body_bytes
        with answering(*content, self._model_id, self._snapshots) as (header, snapshot):
            if snapshot is None:  # another model was requested
                request.reply(header)
            elif kind == "twice":
                request.reply(header, snapshot.data)
                request._connection.send(header, snapshot.data, timeout_s=1.0)
            elif kind == "silent":
                request._connection.receive_header(timeout_s=3.0)  # it waits for the client
            elif kind == "broken":
                request.reply(header + b"\0", b"")
            else:
                reply = ReplyHeader(PARAMETERS, self._model_id, snapshot.tag)
                request.reply(*SPOILS[kind](reply, bytes(snapshot.data), self._format))


# ------------------------------------------------------------------------- what happens


def _values(flat: Tensor) -> tuple[float, ...]:
    return tuple(flat.tolist())


def replaced(world: GossipWorld) -> dict[str, Any]:
    """Return what replaces the classes of the same names in ``gossip.node``."""
    scheduler, history = world.scheduler, world.history

    def life_of(host: str) -> str:
        return f"{host}.{world.lives[host]}"

    class ObservedSnapshots(Snapshots):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self._name = scheduler.current.host
            self._life = life_of(self._name)
            self._being_read: list[Snapshot] = []

        def commit_wire(self, tag: Tag, norm: float) -> None:
            super().commit_wire(tag, norm)
            assert self._latest is not None
            form = self.wire_format
            out = torch.empty(form.numel, dtype=form.dtype)
            values = _values(form.decode(self._latest.wire, 0, out))
            history.add(Published(self._life, self._name, form.schema_checksum, tag, values))

        @contextmanager
        def reading(self) -> Iterator[Snapshot | None]:
            with super().reading() as snapshot:
                if snapshot is None:
                    yield None
                    return
                self._being_read.append(snapshot)
                try:
                    yield snapshot
                finally:
                    self._being_read.remove(snapshot)

        def wire_buffer(self) -> Tensor | None:
            has_begun = self._next is not None
            found = super().wire_buffer()
            if found is None:
                history.add(Unpublished(self._life, len(self._being_read)))
            elif not has_begun:
                readers = sum(snapshot.wire is found for snapshot in self._being_read)
                is_latest = self.latest is not None and self.latest.wire is found
                history.add(Overwritten(self._life, readers, is_latest))
            return found

        def withdraw(self) -> None:
            super().withdraw()
            history.add(Published(self._life, self._name, 0, Tag(0, 0), ()))

    class ObservedSelector(PeerSelector):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._life = life_of(scheduler.current.host)
            self.node: ObservedNode | None = None

        def choose(self, exclude: Collection[str] = ()) -> str | None:
            chosen = super().choose(exclude)
            assert chosen is not None
            passed = [name for name in self.scores if name not in (chosen, *exclude)]
            history.add(Chosen(self._life, chosen, tuple(passed), self.scores))
            return chosen

        def record_failure(self, name: str) -> None:
            super().record_failure(name)
            is_closing = self.node is not None and self.node.is_closing
            history.add(Blamed(self._life, name, is_closing))

    class ObservedFetcher(Fetcher):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self._host = scheduler.current.host
            self._life = life_of(self._host)
            self._deadline = 0.0

        def fetch(self, deadline: float) -> Received | None:
            began_s, delayed_s = scheduler.now, scheduler.delayed_s[self._host]
            history.add(FetchStarted(self._life))
            self._deadline = deadline
            found, stopped = None, False
            try:
                found = super().fetch(deadline)
            except FetcherStopped:
                stopped = True
                raise
            finally:
                delay_s = scheduler.delayed_s[self._host] - delayed_s
                content: tuple[Any, ...] = ("", Tag(0, 0), ())
                if found is not None:
                    content = found.peer, found.tag, _values(found.params)
                limit_s = max(began_s, deadline) - began_s + TICK_S + delay_s
                history.add(
                    Fetched(self._life, *content, stopped, scheduler.now - began_s, limit_s)
                )
            return found

        def _do(self, what: Do, argument: Any) -> Any:
            if what in (Do.REQUEST, Do.RECEIVE):
                assert argument[-1] <= self._deadline, "a wait beyond the deadline of its fetch"
            return super()._do(what, argument)

    class WorldServer(LyingServer):
        pass

    WorldServer.world = world
    return {
        "Snapshots": ObservedSnapshots,
        "PeerSelector": ObservedSelector,
        "Fetcher": ObservedFetcher,
        "SnapshotServer": WorldServer,
    }


LATE_S = 1.0


class ObservedNode(PeerNode):
    """A node that writes down how it was closed."""

    is_closing = False

    def observe(self, node: Node) -> None:
        """Write to the history of this node's world."""
        self._observed = node
        self._selector.node = self  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close, and write down how long it took, and what is left."""
        world, name = self._observed.world, self._observed.name
        scheduler, began_s = world.scheduler, world.scheduler.now
        delayed_s = scheduler.delayed_s[name]
        self.is_closing = True
        super().close()
        late_s = scheduler.delayed_s[name] - delayed_s
        limit_s, own = 2 * TICK_S + late_s, scheduler.current
        left = [
            t.name for t in scheduler.tasks if t.host == name and not t.is_done and t is not own
        ]
        if late_s > LATE_S:  # a thread that did not run for so long is not waited for
            left.clear()
        counts = dataclasses.asdict(self._fetching.decisions.counts)
        life = f"{name}.{self._observed.life}"
        world.history.add(Closed(life, scheduler.now - began_s, limit_s, tuple(left), counts))


class Engine(PairwiseEngine):
    """An engine that writes down what it blends."""

    def observe(self, node: Node) -> None:
        """Write to the history of this node's world."""
        self._observed = node
        self._life = f"{node.name}.{node.life}"
        self._base: tuple[float, ...] = ()

    def update_send(self, loss: float | Tensor | None = None) -> None:
        """Remember the model at the start of a fetch."""
        fetched, values = self._fetching, self._observed.values
        super().update_send(loss)
        if self._fetching and not fetched:
            self._base = values

    def reset(self) -> None:
        """Write down that what was received is dropped."""
        super().reset()
        self._observed.world.history.add(Reset(self._life))

    def update_wait(self, loss: float | Tensor | None = None) -> float:
        """Check that it does not wait longer than for the fetch."""
        scheduler, name = self._observed.world.scheduler, self._observed.name
        began_s, delayed_s = scheduler.now, scheduler.delayed_s[name]
        deadline = self._fetch_began_s + self.settings.fetch_timeout_s
        factor = super().update_wait(loss)
        limit_s = max(deadline - began_s, 0.0) + scheduler.delayed_s[name] - delayed_s
        waited = Waited(name, scheduler.now - began_s, limit_s)
        self._observed.world.history.add(waited)
        return factor

    def _blend(self) -> float:
        node, peer, received = self._observed, self._peer, self._received
        before, was_finite, clock = node.values, self.worker.was_finite, self._clock
        values = () if received is None else _values(received.params)
        factor = super()._blend()
        if received is not None and peer is not None:
            keeps = self.algorithm.keep_progress and was_finite
            base = (*self._base[:-1], before[-1])  # a buffer has no progress
            exchanged = Exchanged(
                self._life,
                received.peer,
                self._exchange.node.wire_format.schema_checksum,  # type: ignore[union-attr]
                peer,
                values,
                factor,
                before,
                base if keeps else before,
                node.values,
                (clock, self._clock),
            )
            node.world.received(node, exchanged)
        return factor
