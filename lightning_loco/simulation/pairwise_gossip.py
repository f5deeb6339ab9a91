"""Simulates pairwise gossip of many workers in one process, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco.algorithms.pairwise_average import PairwiseAverage, Tag
from lightning_loco.costs import LinkLike, LinkTimes, as_links
from lightning_loco.gossip.averaging import ModelAverager, copy_model, served_layout
from lightning_loco.gossip.peer_selection import PeerSelector, worker_name
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.model.flat import CHUNK_ELEMENTS
from lightning_loco.simulation.checks import check_length
from lightning_loco.simulation.messages import VirtualClock
from lightning_loco.simulation.simulation import make_step_times, make_workers
from lightning_loco.simulation.timeline import LossPoint, Timeline, TimelineEvent, WorkerCosts


class _GossipEvent(NamedTuple):
    """An event: the end of a local step, or the answer of a peer to a request."""

    time_s: float
    order: int
    worker: int
    kind: Literal["step", "answer"]


class _Fetch(NamedTuple):
    """A fetch that has begun.

    Attributes:
        peer: Index of the peer.
        began_s: Start of the fetch.
        arrives_s: Arrival of the parameters, or end of the timeout.
        in_time: Whether the parameters arrive before the timeout.
    """

    peer: int
    began_s: float
    arrives_s: float
    in_time: bool


class PairwiseSimulation:
    """Runs pairwise gossip in one process, with the peers, factors and blends of a real run.

    Before each local step a worker may begin to fetch the parameters of a random peer; it blends
    them in after the first local step at whose end they have arrived. The peer sends the parameters
    with which it began its present local step. No worker waits for another one.

    A fetch takes as long as with the emulated links of a real run. Simultaneous fetches from one
    peer do not share its link, an uplink of a site is shared as if all workers fetched at the same
    time, and parameters are never rejected for their norm.

    Args:
        models: One module per worker; all start from the parameters of the first one.
        algorithm: How to average with the parameters of a peer.
        speeds: Local steps per second of each worker.
        jitter: As in :class:`~lightning_loco.Simulation`.
        links: As in :class:`~lightning_loco.Simulation`.
        compression: Codec of the parameters on the wire, as in
            :class:`~lightning_loco.PairwiseEngine`.
        fetch_timeout_s: Longest duration of a fetch in seconds.
        seed: Seed of the jitter, and of the choice of peers.

    Attributes:
        clocks: The clock of each worker: the number of local steps in its parameters.

    Raises:
        ValueError: If there are fewer than two models, or a setting is invalid for them.

    Example:
        >>> import torch
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> simulation = PairwiseSimulation(models, speeds=[1.0, 0.5])
        >>> def local_step(worker):
        ...     models[worker].weight.data.fill_(float(worker))
        >>> simulation.run(local_step, seconds=3.0)
        >>> [costs.steps for costs in simulation.costs]
        [3, 1]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        algorithm: PairwiseAverage | None = None,
        *,
        speeds: Sequence[float],
        jitter: float = 0.0,
        links: LinkLike | None = None,
        compression: Any | None = None,
        fetch_timeout_s: float = 2.5,
        seed: int = 0,
    ) -> None:
        n = len(models)
        if n < 2:
            raise ValueError(f"Pairwise gossip needs at least two models, got {n}.")
        settings = PairwiseSettings(
            algorithm or PairwiseAverage(),
            fetch_timeout_s=fetch_timeout_s,
            compression=compression,
            link=as_links(links),
        ).prepare(n)
        self.algorithm, self._settings = settings.algorithm, settings
        self._step_times = make_step_times(speeds, n, jitter, seed)
        self._times = None if settings.link is None else LinkTimes(settings.link, n)
        self._timeline = Timeline(n)
        self.clocks = [0.0] * n
        replicas = [
            worker.replica
            for worker in make_workers(models, settings, [VirtualClock() for _ in models])
        ]
        self._num_params = replicas[0].layout.numel
        self._layouts = [served_layout(r.layout, r.buffers, CHUNK_ELEMENTS) for r in replicas]
        self._averagers = [
            ModelAverager(layout, self.algorithm, self._num_params) for layout in self._layouts
        ]
        names = [worker_name(worker) for worker in range(n)]
        self._names = names
        self._selectors = [
            PeerSelector([name for name in names if name != names[w]], 1_000_003 * seed + w)
            for w in range(n)
        ]
        self._draws = torch.Generator().manual_seed(seed)
        self._time_s, self._made, self._blends = [0.0] * n, [0] * n, [0] * n
        self._bytes, self._last_losses = [0] * n, [math.nan] * n
        self._fetches: list[_Fetch | None] = [None] * n
        self._received: list[tuple[Tensor, Tag] | None] = [None] * n
        self._order = itertools.count()
        self._events: list[_GossipEvent] = []
        self._ended_s = 0.0
        for worker in range(n):
            self._begin_step(worker)

    @torch.no_grad()
    def _begin_step(self, worker: int) -> None:
        """Begin a local step, and maybe a fetch, as ``PairwiseEngine.update_send`` does."""
        now_s = self._time_s[worker]
        self.clocks[worker] += 1
        step_s = self._step_times.seconds(worker, self._made[worker])
        self._plan(now_s + step_s, worker, "step")
        probability = self.algorithm.fetch_probability
        draw = float(torch.rand((), dtype=torch.float32, generator=self._draws, device="cpu"))
        if self._fetches[worker] is not None or not draw < probability:
            return
        name = self._selectors[worker].choose()
        assert name is not None
        peer = self._names.index(name)
        self._averagers[worker].record_fetch_start()
        busy_s, latency_s = 0.0, 0.0
        if self._times is not None:
            time = self._times.fetch(worker, peer, self._num_bytes, self._made[worker])
            busy_s, latency_s = time
        in_time = busy_s + latency_s <= self._settings.fetch_timeout_s
        took_s = busy_s + latency_s if in_time else self._settings.fetch_timeout_s
        self._fetches[worker] = _Fetch(peer, now_s, now_s + took_s, in_time)
        if in_time:
            self._plan(now_s + latency_s / 2, worker, "answer")

    def _plan(self, time_s: float, worker: int, kind: Literal["step", "answer"]) -> None:
        heapq.heappush(self._events, _GossipEvent(time_s, next(self._order), worker, kind))

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._layouts)

    @property
    def _num_bytes(self) -> int:
        """Bytes of the parameters of a worker on the wire."""
        layout, codec = self._layouts[0], self._settings.codec
        return layout.num_bytes if codec is None else codec.num_bytes(layout.numel)

    def run(self, local_step: Callable[[int], Any], *, seconds: float) -> None:
        """Run for some virtual time; local steps that would end later are left for the next call.

        Args:
            local_step: Called with the index of a worker; must take one optimizer step of its
                model. It may return the loss, which interpolation by loss needs.
            seconds: Virtual time to run for.

        Raises:
            ValueError: If ``seconds`` is negative or not finite.
        """
        check_length(None, seconds, self._step_times.step_s)
        self._ended_s += seconds
        while self._events and self._events[0].time_s <= self._ended_s:
            event = heapq.heappop(self._events)
            if event.kind == "answer":
                self._answer(event.worker)
            else:
                self._end_step(event.worker, event.time_s, local_step)

    @torch.no_grad()
    def _answer(self, worker: int) -> None:
        """Let the peer of a worker send its present parameters, which arrive later."""
        fetch = self._fetches[worker]
        assert fetch is not None
        peer = fetch.peer
        loss = self._last_losses[peer]
        if self.algorithm.uses_loss and math.isnan(loss):
            return  # the peer has published nothing yet
        layout = self._layouts[peer]
        flat = torch.empty(layout.numel, dtype=layout.dtype, device="cpu")
        copy_model(layout, flat)
        if (codec := self._settings.codec) is not None:
            codec.decode(codec.encode(flat), flat)
        self._bytes[peer] += self._num_bytes
        self._received[worker] = flat, Tag(self.clocks[peer], 0.0 if math.isnan(loss) else loss)

    def _end_step(self, worker: int, now_s: float, local_step: Callable[[int], Any]) -> None:
        self._timeline.add(worker, "compute", self._time_s[worker], now_s)
        self._time_s[worker] = now_s
        loss = local_step(worker)
        self._made[worker] += 1
        found = self._timeline.add_loss(worker, self._made[worker], now_s, loss)
        if found is not None:
            self._last_losses[worker] = found
        fetch = self._fetches[worker]
        if fetch is not None and fetch.arrives_s <= now_s:
            self._fetches[worker] = None
            self._timeline.add(worker, "send", fetch.began_s, fetch.arrives_s)
            self._blend(worker, fetch)
        self._begin_step(worker)

    @torch.no_grad()
    def _blend(self, worker: int, fetch: _Fetch) -> None:
        """Blend in the result of a fetch, as ``PairwiseEngine.update_wait`` does."""
        received, self._received[worker] = self._received[worker], None
        selector, name = self._selectors[worker], self._names[fetch.peer]
        if not fetch.in_time:
            selector.record_failure(name)
        if received is None:
            return
        params, peer = received
        if not bool(torch.isfinite(params).all()):
            selector.record_failure(name)
            return
        selector.record_success(name)
        own = Tag(self.clocks[worker], self._last_losses[worker])
        factor = self.algorithm.blend_factor(own, peer)
        self._averagers[worker].blend(params, factor, was_finite=True)
        self.clocks[worker] = self.algorithm.blended_clock(own.clock, peer.clock, factor)
        self._blends[worker] += 1

    @property
    def losses(self) -> list[LossPoint]:
        """Losses that ``local_step`` has returned, in the order of virtual time."""
        return self._timeline.losses

    @property
    def timeline(self) -> list[TimelineEvent]:
        """Events of all workers with their times; ``"send"`` is a fetch."""
        return list(self._timeline.events)

    @property
    def costs(self) -> list[WorkerCosts]:
        """Costs of each worker; rounds are its blends, bytes sent are the fetches of others."""
        return [
            self._timeline.costs_of(
                worker,
                self._made[worker],
                self._blends[worker],
                self._bytes[worker],
                self._time_s[worker],
            )
            for worker in range(self.num_workers)
        ]

    def params(self) -> list[Tensor]:
        """Return a flat copy of each worker's parameters and floating-point buffers, ``(P,)``."""
        copies = []
        for layout in self._layouts:
            copies.append(torch.empty(layout.numel, dtype=layout.dtype, device="cpu"))
            copy_model(layout, copies[-1])
        return copies

    def consensus(self) -> Tensor:
        """Return the mean of the workers' trainable parameters, ``(P,)``."""
        return torch.stack([flat[: self._num_params] for flat in self.params()]).mean(0)
