"""Pairwise gossip in the simulation: an engine per worker, which fetches on the virtual clock."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.costs import TransferTime
from lightning_loco.gossip.engine import PairwiseEngine
from lightning_loco.gossip.fetcher import Received
from lightning_loco.gossip.peer_selection import PeerSelector, peer_seed, worker_name
from lightning_loco.gossip.protocol import WireFormat
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshots import Publisher, Snapshots
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.worker import Worker
from lightning_loco.simulation.failures import Failure
from lightning_loco.simulation.family import Family


class Pulls(Family):
    """The engines of all workers, each of which fetches the parameters of random peers.

    A peer answers with the latest parameters that it had published when the request arrived. A
    fetch takes as long as with the emulated links of a real run. Simultaneous fetches from one peer
    do not share its link, an uplink of a site is shared as if all workers fetched at the same time,
    and parameters are never rejected for their norm.
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
        peer: Index of the peer.
        began_s: Start of the fetch.
        asked_s: Arrival of the request.
        arrives_s: Arrival of the parameters, or end of the timeout.
        in_time: Whether the parameters arrive before the timeout.
        received: The parameters and their tag, once the peer has answered; None until then, and if
            it had published nothing.
    """

    peer: int
    began_s: float
    asked_s: float
    arrives_s: float
    in_time: bool
    received: tuple[Tensor, Tag] | None = None


class AnsweringSnapshots(Snapshots):
    """The snapshots of one simulated worker, with the requests that it has not answered yet.

    Requests are answered before other parameters are published, so each answer holds those of the
    time at which the request has arrived.
    """

    def __init__(self, worker: Worker, layout: FlatLayout, settings: PairwiseSettings) -> None:
        super().__init__(WireFormat(0, layout.numel, layout.dtype))
        self.requests: list[Fetch] = []
        self._codec, self._worker, self.plain_bytes = settings.codec, worker, layout.num_bytes
        self.num_bytes = self.plain_bytes
        if self._codec is not None:
            self.num_bytes = self._codec.num_bytes(layout.numel)

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
        if (latest := self.latest) is None:
            return
        flat = latest.wire.view(self.wire_format.dtype).clone()
        if self._codec is not None:
            self._codec.decode(self._codec.encode(flat), flat)
        self._worker.statistics.count_compressed(self.num_bytes, self.plain_bytes)
        fetch.received = flat, latest.tag


class SimulatedNode:
    """Fetches for one worker on the virtual clock, as a :class:`PeerNode` does in real time."""

    def __init__(self, pulls: Pulls, worker: Worker, layout: FlatLayout) -> None:
        self.snapshots = AnsweringSnapshots(worker, layout, pulls.settings)
        self._pulls, self._group, self._worker = pulls, worker.group, worker
        own = self._group.worker
        self._fetch: Fetch | None = None
        self._names = [worker_name(number) for number in range(self._group.num_workers)]
        others = [name for number, name in enumerate(self._names) if number != own]
        self._selector = PeerSelector(others, peer_seed(pulls.seed, own))

    def start_fetch(self) -> None:
        """Send a request to a random peer."""
        name = self._selector.choose()
        assert name is not None
        peer, now_s = self._names.index(name), self._group.clock.now()
        time, limit_s = TransferTime(0.0, 0.0), self._pulls.settings.fetch_timeout_s
        if (times := self._pulls.times) is not None:
            num_bytes = self.snapshots.num_bytes
            time = times.fetch(self._group.worker, peer, num_bytes, self._worker.steps)
        arrives_s, in_time = now_s + min(time.seconds, limit_s), time.seconds <= limit_s
        self._fetch = Fetch(peer, now_s, now_s + time.latency_s / 2, arrives_s, in_time)
        if in_time:
            self._pulls.nodes[peer].snapshots.requests.append(self._fetch)

    @property
    def has_ended(self) -> bool:
        """Whether the parameters have arrived, or the timeout is over."""
        return self._fetch is None or self._group.clock.now() >= self._fetch.arrives_s

    def wait(self) -> Received | None:
        """Return the result of a fetch that has ended; None if there are no usable parameters."""
        fetch, self._fetch = self._fetch, None
        assert fetch is not None
        began_s, arrives_s, name = fetch.began_s, fetch.arrives_s, self._names[fetch.peer]
        self._pulls.timeline.add(self._group.worker, "send", began_s, arrives_s)
        self._pulls.nodes[fetch.peer].snapshots.answer(fetch)
        if fetch.in_time and fetch.received is None:
            return None  # the peer had published nothing yet, which is no failure
        if fetch.received is None or not bool(torch.isfinite(fetch.received[0]).all()):
            self._selector.record_failure(name)
            return None
        self._selector.record_success(name)
        num_bytes = self.snapshots.num_bytes
        return Received(*fetch.received, name, arrives_s - began_s, num_bytes)

    def count_sent(self) -> tuple[int, int]:
        """Return no bytes: they are counted when a request is answered."""
        return 0, 0

    def close(self) -> None:
        """Do nothing: there are no threads."""
