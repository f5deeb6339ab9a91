"""Pairwise gossip in the simulation: an engine per worker, which fetches on the virtual clock."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.decisions import Decision, carry_out
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.costs import TransferTime
from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.fetch_decisions import Accepted, Do, FetchDecisions
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.peer_selection import PeerSelector, peer_seed, worker_name
from lightning_loco.gossip.protocol import WireFormat, pack_request
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshot_server import answering
from lightning_loco.gossip.snapshots import Publisher, Snapshots
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.worker import Worker
from lightning_loco.simulation.failures import Failure
from lightning_loco.simulation.family import Family


class Pulls(Family):
    """The engines of all workers, each of which fetches the parameters of random peers.

    A peer answers with the latest parameters that it had published when the request arrived. A
    fetch takes as long as with the emulated links of a real run, but asks one peer only.
    Simultaneous fetches from one peer do not share its link, and an uplink of a site is shared as
    if all workers fetched at the same time.
    """

    participants: list[PairwiseEngine]
    settings: PairwiseSettings
    has_rounds = False

    def make_participants(self, workers: Sequence[Worker]) -> list[PairwiseEngine]:
        """Make an engine and a node for each worker."""
        self.nodes: list[SimulatedNode] = []
        draws = torch.Generator().manual_seed(self.seed)

        def draw() -> float:
            return float(torch.rand((), dtype=torch.float32, generator=draws, device="cpu"))

        return [
            PairwiseEngine.of_worker(
                worker, self.settings, functools.partial(self._connect, worker), draw
            )
            for worker in workers
        ]

    def _connect(self, worker: Worker, layout: FlatLayout) -> tuple[SimulatedNode, Publisher]:
        self.nodes.append(node := SimulatedNode(self, worker, layout))
        return node, Publisher(node.snapshots, layout, worker.group.clock)

    @staticmethod
    def prepare(
        settings: PairwiseSettings, num_workers: int, failures: Sequence[Failure], seed: int
    ) -> PairwiseSettings:
        """Check the settings; ValueError for what is not simulated."""
        if num_workers < 2:
            raise ValueError(f"Pairwise gossip needs at least two models, got {num_workers}.")
        if failures:
            raise ValueError(
                "PairwiseGossip is simulated without failures. Drop failures=... or "
                "simulation.mean_between_failures_s, or choose an algorithm with rounds."
            )
        if settings.nodes is not None:
            raise ValueError("Simulated workers belong to one job. Drop algorithm.nodes.")
        return settings.prepare(num_workers, seed)

    def finish_run(self, end_s: float) -> None:
        """Answer all requests that have arrived until then."""
        for node in self.nodes:
            node.snapshots.answer_before(math.nextafter(end_s, math.inf))


@dataclasses.dataclass(eq=False)
class Fetch:
    """A fetch that has begun.

    Attributes:
        decision: What the node that fetches decides; it waits for the outcome of ``action``.
        action: The request.
        peer: Index of the peer.
        began_s: Start of the fetch.
        asked_s: Arrival of the request.
        arrives_s: Arrival of the parameters, or end of the timeout.
        reply: Its header, and how many bytes follow; None until the peer has answered.
        params: The parameters that follow, decoded.
    """

    decision: Decision[Do, Accepted | None]
    action: tuple[Do, Any]
    peer: int
    began_s: float
    asked_s: float
    arrives_s: float
    reply: tuple[bytes, int] | None = None
    params: Tensor = dataclasses.field(init=False)

    def do(self, what: Do, argument: Any) -> tuple[bytes, int] | Tensor | None:
        """Return the outcome of an action; all have ended at ``arrives_s``."""
        if what is Do.REQUEST:
            if self.reply is None:
                raise TimeoutError
            return self.reply
        return self.params[argument[1]] if what is Do.RECEIVE else None


class AnsweringSnapshots(Snapshots):
    """The snapshots of one simulated worker, with the requests that it has not answered yet.

    Requests are answered before other parameters are published, so each answer holds those of the
    time at which the request has arrived.

    Attributes:
        sent_format: How the parameters are sent; they are encoded only when they are.
    """

    def __init__(self, worker: Worker, layout: FlatLayout, settings: PairwiseSettings) -> None:
        super().__init__(WireFormat(0, layout.numel, layout.dtype))
        self.requests: list[Fetch] = []
        self.sent_format = self.wire_format._replace(codec=settings.codec)
        self._worker = worker
        self._model_id = self.sent_format.model_id

    def commit_flat(self, tag: Tag, norm: float) -> None:
        """Publish parameters, after all requests before now have been answered."""
        self.answer_before(self._worker.group.clock.now())
        super().commit_flat(tag, norm)

    def answer_before(self, time_s: float) -> None:
        """Answer all requests that have arrived before a time."""
        for fetch in [fetch for fetch in self.requests if fetch.asked_s < time_s]:
            self.answer(fetch)

    def answer(self, fetch: Fetch) -> None:
        """Answer a request with the latest parameters, unless it has been answered."""
        if fetch not in self.requests:
            return
        self.requests.remove(fetch)
        request, num_bytes = pack_request(self._model_id), self.sent_format.total_bytes
        with answering(request, 0, self._model_id, self) as (header, snapshot):
            fetch.reply = header, 0 if snapshot is None else num_bytes
            if snapshot is None:
                return
            fetch.params = flat = snapshot.wire.view(self.wire_format.dtype).clone()
        if (codec := self.sent_format.codec) is not None:
            codec.decode(codec.encode(flat), flat)
        self._worker.statistics.count_compressed(num_bytes, self.wire_format.total_bytes)


class SimulatedNode:
    """Fetches for one worker on the virtual clock, as a :class:`PeerNode` does in real time."""

    def __init__(self, pulls: Pulls, worker: Worker, layout: FlatLayout) -> None:
        self.snapshots = AnsweringSnapshots(worker, layout, pulls.settings)
        self._pulls, self._group, self._worker = pulls, worker.group, worker
        own = self._group.worker
        self._fetch: Fetch | None = None
        self._names = [worker_name(number) for number in range(self._group.num_workers)]
        others = [name for number, name in enumerate(self._names) if number != own]
        self._decisions = FetchDecisions(
            self.snapshots.sent_format,
            PeerSelector(others, peer_seed(pulls.seed, own)),
            self.snapshots,
            fetch_timeout_s=pulls.settings.fetch_timeout_s,
            max_peers=1,
            clock=self._group.clock,
        )

    def start_fetch(self) -> None:
        """Send a request to a random peer."""
        now_s = self._group.clock.now()
        decision = self._decisions.run(now_s + self._decisions.fetch_timeout_s)
        action = next(decision)
        name, until_s = action[1]
        peer, time = self._names.index(name), TransferTime(0.0, 0.0)
        if (times := self._pulls.times) is not None:
            num_bytes = self.snapshots.sent_format.total_bytes
            time = times.fetch(self._group.worker, peer, num_bytes, self._worker.steps)
        asked_s, arrives_s = now_s + time.latency_s / 2, now_s + time.seconds
        self._fetch = Fetch(decision, action, peer, now_s, asked_s, min(arrives_s, until_s))
        if arrives_s <= until_s:
            self._pulls.nodes[peer].snapshots.requests.append(self._fetch)

    @property
    def has_ended(self) -> bool:
        """Whether the parameters have arrived, or the timeout is over."""
        return self._fetch is None or self._group.clock.now() >= self._fetch.arrives_s

    def wait(self) -> Received | None:
        """Return the result of a fetch that has ended; None if there are no usable parameters."""
        fetch, self._fetch = self._fetch, None
        assert fetch is not None
        began_s, arrives_s = fetch.began_s, fetch.arrives_s
        self._pulls.timeline.add(self._group.worker, "send", began_s, arrives_s)
        self._pulls.nodes[fetch.peer].snapshots.answer(fetch)
        accepted = carry_out(fetch.decision, fetch.do, fetch.action)
        if accepted is None:
            return None
        num_bytes = self.snapshots.sent_format.total_bytes
        return Received(fetch.params, accepted.tag, accepted.peer, arrives_s - began_s, num_bytes)

    def count_sent(self) -> tuple[int, int]:
        """Return no bytes: they are counted when a request is answered."""
        return 0, 0

    def close(self) -> None:
        """Do nothing: there are no threads."""
