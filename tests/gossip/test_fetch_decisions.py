"""Nodes on a clock of their own, without sockets and threads, with events in any order."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_loco._util.clock import Clock
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip import fetch_decisions
from lightning_loco.gossip.fetch_decisions import (
    Accepted,
    Do,
    FetchCounts,
    FetchDecisions,
    FetcherStopped,
)
from lightning_loco.gossip.peer_selection import MAX_SCORE, MIN_SCORE, PeerSelector
from lightning_loco.gossip.protocol import (
    PARAMETERS,
    ReplyHeader,
    WireFormat,
    pack_reply,
    pack_request,
)
from lightning_loco.gossip.snapshot_server import answering
from lightning_loco.gossip.snapshots import Snapshot, Snapshots

FORMAT = WireFormat(7, 12, torch.float32)
NAMES = [f"n{number}" for number in range(5)]
LONG_GONE = NAMES[-1]
TIMEOUT_S = 1.0
RUN_S = 40.0
CALM = 0.005
MAX_CHOICES = MAX_SCORE - MIN_SCORE
"""After this many choices a peer that has failed has caught up with the others."""

OTHER_ID = FORMAT.model_id._replace(schema_checksum=8)
WRONG: dict[str, tuple[bytes, int]] = {
    "malformed": (b"nonsense", FORMAT.total_bytes),
    "another model": (pack_reply(ReplyHeader(PARAMETERS, OTHER_ID)), FORMAT.total_bytes),
    "too short": (pack_reply(ReplyHeader(PARAMETERS, FORMAT.model_id)), FORMAT.total_bytes - 4),
    "no clock": (
        pack_reply(ReplyHeader(PARAMETERS, FORMAT.model_id, Tag(math.nan, 1.0))),
        FORMAT.total_bytes,
    ),
}
OUTCOMES = "accepted", "none", "stopped"
SPOILED = {"not finite": math.nan, "too large": 1e20}


class Network(Clock):
    """Nodes and what they wait for. Its time is that of the next event.

    ``share`` is how many of the replies are wrong, and how many of the messages are late.
    """

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share = random.Random(seed), share
        self.nodes: dict[str, Node] = {}
        self.outcomes: Counter[str] = Counter()
        self._time, self._number = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:  # type: ignore[override]
        return self._time

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._time, _, event = heapq.heappop(self._events)
            event()

    def start(self, name: str) -> None:
        """Start a node, perhaps again; the others have not asked it yet."""
        if name not in self.nodes:
            for node in self.nodes.values():
                node.unasked[name] = 0
            self.nodes[name] = Node(self, name)

    def kill(self, name: str) -> None:
        if name in self.nodes:
            self.nodes.pop(name).kill()
            for node in self.nodes.values():
                node.unasked.pop(name, None)

    @property
    def is_running(self) -> bool:
        """Whether there is still a node that has not asked one that was started again."""
        return self.now() < RUN_S or any(node.unasked for node in self.nodes.values())

    def delay(self) -> float:
        is_late = self.random.random() < self.share
        return self.random.uniform(0.0, 2 * TIMEOUT_S if is_late else 0.02)


class Node:
    """Publishes vectors of one value, which is also their clock, and fetches all the time."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.is_killed = False
        self.unasked: dict[str, int] = {}
        self.snapshots = Snapshots(FORMAT)
        self.selector = PeerSelector(
            [n for n in NAMES if n != name], network.random.getrandbits(32)
        )
        self.decisions = FetchDecisions(
            FORMAT,
            self.selector,
            self.snapshots,
            clock=network,
            fetch_timeout_s=TIMEOUT_S,
            duration=(lambda *_: network.delay()) if name == NAMES[0] else None,
        )
        self.fetch: Fetch | None = None
        self._published = 0
        network.at(network.now() + 0.1, self.publish)
        network.at(network.now(), self.start_fetch)

    def publish(self) -> None:
        if not self.is_killed and self.network.is_running:
            self._published += 1
            value = 1 + self._published / 1024
            self.snapshots.publish(torch.full((FORMAT.numel,), value), Tag(value, 1.0))
            self.network.at(self.network.now() + self.network.random.uniform(0, 0.1), self.publish)

    def start_fetch(self) -> None:
        if not self.is_killed and self.network.is_running:
            self.fetch = Fetch(self)

    def count_choice(self, chosen: str) -> None:
        self.unasked.pop(chosen, None)
        for name in self.unasked:
            self.unasked[name] += 1
            assert self.unasked[name] <= MAX_CHOICES, f"{name} is back and not asked"

    def kill(self) -> None:
        self.is_killed = self.decisions.is_stopped = True
        self.network.outcomes.update(dataclasses.asdict(self.decisions.counts))
        before = self.selector.scores
        if self.fetch is not None:
            is_paused = self.fetch.doing is Do.PAUSE
            self.fetch.step(error=FetcherStopped() if is_paused else ConnectionAbortedError())
        assert self.selector.scores == before, "a peer lost points for the end of this node"


class Fetch:
    """Carries out the decisions of one fetch, with what the network makes of each action."""

    def __init__(self, node: Node) -> None:
        self.node, self.network = node, node.network
        self.began = self.network.now()
        self.deadline = self.began + TIMEOUT_S
        self.decision = node.decisions.run(self.deadline)
        self.has_ended = False
        self.close_lease = contextlib.ExitStack()
        self.lease: tuple[Node, Snapshot, Tag] | None = None
        self.wrong: str | None = None
        self.step()

    def step(self, outcome: Any = None, error: Exception | None = None) -> None:
        if self.has_ended:  # its node was killed
            return
        try:
            action = self.decision.send(outcome) if error is None else self.decision.throw(error)
        except StopIteration as done:
            self.end("none" if done.value is None else "accepted", done.value)
        except FetcherStopped:
            assert self.node.is_killed
            self.end("stopped", None)
        else:
            self.do(*action)

    def do(self, what: Do, argument: Any) -> None:
        self.doing = what
        match what:
            case Do.REQUEST:
                name, until = argument
                self.node.count_choice(name)
                self.release()
                asked = self.network.now() + self.network.delay()
                self.network.at(min(asked, until), lambda: self.ask(name, until))
            case Do.RECEIVE:
                part, values, until = argument
                assert (part.start, part.stop) == (4 * values.start, 4 * values.stop)
                self.later(until, lambda: self.receive(values))
            case Do.PAUSE:
                assert argument <= self.deadline
                self.network.at(argument, self.step)
            case Do.DISCONNECT:
                self.release()
                self.step()

    def later(self, until: float, act: Callable[[], Any]) -> None:
        """Do a step with the outcome of a function after a while, or with a timeout."""
        arrives = self.network.now() + self.network.delay()

        def arrive() -> None:
            if self.has_ended:
                return
            try:
                if arrives > until:
                    raise TimeoutError
                outcome = act()
            except OSError as error:
                self.step(error=error)
            else:
                self.step(outcome)

        self.network.at(min(arrives, until), arrive)

    def ask(self, name: str, until: float) -> None:
        """Let a request arrive, whose reply may be wrong."""
        if self.has_ended:
            return
        peer = self.network.nodes.get(name)
        if peer is None:
            if self.network.random.random() < 0.5:
                self.step(error=ConnectionRefusedError())
            else:
                self.network.at(until, lambda: self.step(error=TimeoutError()))
            return
        request = pack_request(FORMAT.model_id)
        leased = answering(request, 0, FORMAT.model_id, peer.snapshots)
        header, snapshot = self.close_lease.enter_context(leased)
        start = header, 0 if snapshot is None else FORMAT.total_bytes
        self.wrong = None
        if snapshot is not None:
            self.lease = peer, snapshot, snapshot.tag
            if self.network.random.random() < self.network.share:
                self.wrong = self.network.random.choice([*WRONG, *SPOILED])
                if self.wrong in WRONG:
                    start = WRONG[self.wrong]
        self.later(until, lambda: start)

    def receive(self, values: slice) -> torch.Tensor:
        assert self.lease is not None
        peer, snapshot, tag = self.lease
        if peer.is_killed:
            raise ConnectionResetError
        whole = snapshot.wire.view(torch.float32)
        assert snapshot.tag == tag
        assert whole.tolist() == [tag.clock] * FORMAT.numel, "a lease was overwritten"
        return torch.full_like(whole[values], SPOILED.get(self.wrong or "", tag.clock))

    def release(self) -> None:
        self.close_lease.close()
        self.lease = None

    def end(self, outcome: str, accepted: Accepted | None) -> None:
        now, network = self.network.now(), self.network
        assert now <= self.deadline, f"a fetch took {now - self.began} s"
        if accepted is not None:
            assert self.wrong is None, "a wrong reply was accepted"
            assert self.lease is not None
            assert (accepted.peer, accepted.tag) == (self.lease[0].name, self.lease[2])
            assert accepted.fetch_s <= TIMEOUT_S
        self.has_ended, self.node.fetch = True, None
        self.release()
        network.outcomes[outcome] += 1
        network.at(now + network.random.uniform(0, 0.1), self.node.start_fetch)


@pytest.mark.parametrize(("seed", "share"), [(0, CALM), (1, CALM), (2, 0.4), (3, 0.4), (4, 0.4)])
def test_fetches_end_in_time_and_find_peers_again(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_decisions, "CHUNK_BYTES", 16)
    network = Network(seed, share)
    for name in NAMES:
        network.start(name)
    network.at(5.0, lambda: network.kill(LONG_GONE))
    for time in range(10, int(RUN_S) - 10, 5):
        name = network.random.choice(NAMES[:-1])
        network.at(time, lambda name=name: network.kill(name))
        network.at(time + network.random.uniform(0, 4), lambda name=name: network.start(name))
    network.run(RUN_S)
    for node, _ in itertools.product(network.nodes.values(), range(MAX_SCORE // 100)):
        node.selector.record_failure(LONG_GONE)  # as if it had been asked all day
    network.start(LONG_GONE)
    network.run(math.inf)
    assert len(network.nodes) == len(NAMES)
    for node in list(network.nodes.values()):
        assert node.fetch is None
        node.kill()
    if share == CALM:
        assert network.outcomes["accepted"] > 10 * network.outcomes["none"]
    else:
        seen = {name for name, count in network.outcomes.items() if count}
        assert seen == {*dataclasses.asdict(FetchCounts()), *OUTCOMES} - {"errors"}
