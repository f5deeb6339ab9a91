"""Simulates any number of workers in one process, for tests, teaching and planning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import IN_ROUND, KnownStatuses, WorkerStatus
from lightning_loco.engine.buckets import Bucket, group_chunks
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.base import Exchange, SeparateStatuses
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.fragment_sync import FragmentSync, PendingRound
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.parameters.flat import FlatLayout
from lightning_loco.parameters.schema import check_model, first_difference
from lightning_loco.schedules import StepInfo, SyncEvery, by_steps


class Simulation:
    """Runs workers in turn: the local steps of each worker, then one round of all.

    It computes the same numbers as the processes of a real run, in the same order; only the
    exchange is replaced by its :meth:`simulate`. All workers start from the parameters of the first
    one.

    Args:
        models: One module per worker, all with the same parameters.
        algorithm: What a round computes.
        sync_every: Local steps between rounds: one number, one per worker, or a mapping.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: The graph of gossip: a topology, a name, a graph or a matrix.
        compression: How messages are encoded, as in ``LocoStrategy``.

    Attributes:
        states: The algorithm's state of each worker.
        round_index: Number of completed rounds.

    Raises:
        ValueError: If there is no model, or the settings are invalid for these workers.

    Example:
        >>> import torch
        >>> from lightning_loco.algorithms import LocalSGD
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> simulation = Simulation(models, LocalSGD(), sync_every=1)
        >>> def local_step(worker):
        ...     models[worker].weight.data.fill_(float(worker))
        >>> simulation.run(local_step, num_rounds=1)
        >>> [model.weight.item() for model in models]
        [0.5, 0.5]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        algorithm: Algorithm,
        *,
        sync_every: SyncEvery = 1,
        overlap: bool = False,
        warm_start: bool = True,
        topology: Any | None = None,
        compression: Any | None = None,
    ) -> None:
        schedule = by_steps(sync_every, overlap, warm_start)
        self._set_up(models, RoundSettings(algorithm, schedule, topology, compression))

    @classmethod
    def from_settings(cls, models: Sequence[nn.Module], settings: RoundSettings) -> Simulation:
        """Create a simulation with any schedule that counts steps, codec and merge policy.

        Raises:
            ValueError: If the schedule follows the clock, or as in the class.
        """
        simulation = cls.__new__(cls)
        simulation._set_up(models, settings)  # noqa: SLF001
        return simulation

    def _set_up(self, models: Sequence[nn.Module], settings: RoundSettings) -> None:
        if not models:
            raise ValueError("A simulation needs at least one model, one per worker; got none.")
        self.settings = settings.prepare(len(models), torch.initial_seed() % 2**31)
        self.algorithm = self.settings.algorithm
        self._schedule = self.settings.schedule
        if self._schedule.sync_every_of(0) is None:
            raise ValueError(f"A simulation counts steps and has no clock for {self._schedule}.")
        self.round_index = 0
        self._steps = [0] * len(models)
        for model in models:
            check_model(model)
        self._layouts = [self._layout_of(model) for model in models]
        for worker, (model, layout) in enumerate(zip(models, self._layouts, strict=True)):
            if layout.schema() != self._layouts[0].schema():
                difference = first_difference(layout.schema(), self._layouts[0].schema())
                raise ValueError(
                    f"Worker {worker} holds a different model than worker 0: {difference}. "
                    "Build the same model for every worker."
                )
            model.load_state_dict(models[0].state_dict())
        self._fragments = self._make_fragments()
        self.states: list[State] = [fragment.state for fragment in self._fragments[0]]

    def _layout_of(self, model: nn.Module) -> FlatLayout:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        itemsize = max(4, *(p.element_size() for _, p in named))
        cuts = self.settings.cuts({name: p.numel() for name, p in named}, itemsize)
        return FlatLayout(named, cuts)

    def _make_fragments(self) -> list[list[FragmentSync]]:
        """Create the fragments of all workers, indexed by fragment and worker."""
        settings, layouts = self.settings, self._layouts
        alone, statistics = WorkerGroup(0, 1), Statistics()
        exchange = make_exchange(
            self.algorithm, alone, statistics, settings.topology, settings.compression
        )
        has_feedback = settings.compression is not None and settings.compression.has_feedback
        start = layouts[0].new_flat()
        states = [self.algorithm.init(start.clone()) for _ in layouts]
        residuals = [settings.init_residual(start) for _ in layouts]
        longest = settings.bucket_elements(layouts[0].numel, layouts[0].dtype.itemsize)
        fragments = []
        for slices in settings.schedule.fragment_slices(layouts[0].sizes):
            hub = Hub(exchange, self.num_workers, longest, has_feedback)
            of_workers = []
            for worker, layout in enumerate(layouts):
                state, residual = states[worker], residuals[worker]
                memory = FragmentMemory(layout, slices, settings, state, residual, layout.numel)
                of_workers.append(FragmentSync(memory, settings, hub.of_worker(worker)))
            fragments.append(of_workers)
        return fragments

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._layouts)

    def run(self, local_step: Callable[[int], None], num_rounds: int) -> None:
        """Alternate local steps and rounds.

        Args:
            local_step: Called with the index of a worker; must make one optimizer step of its
                model.
            num_rounds: Number of rounds.
        """
        for _ in range(num_rounds):
            for worker in range(self.num_workers):
                since_round = 0
                while not self._apply_due(worker, since_round):
                    local_step(worker)
                    self._steps[worker] += 1
                    since_round += 1
            self.make_round()

    @torch.no_grad()
    def _apply_due(self, worker: int, since_round: int) -> bool:
        """Apply the pending rounds of a worker that end now; return whether it begins a round."""
        schedule, begins = self._schedule.of_worker(worker), False
        for index, of_workers in enumerate(self._fragments):
            fragment = of_workers[worker]
            counts = self._steps[worker], since_round, self.round_index
            begin, end = schedule.due(StepInfo(*counts, index, math.inf, fragment.pending))
            begins = begins or begin
            if end and not begin:
                fragment.apply(self._steps[worker])
        return begins

    @torch.no_grad()
    def make_round(self) -> None:
        """Make one round of all workers."""
        fragments = self._fragments[self.round_index % len(self._fragments)]
        statuses = self._statuses(fragments)
        is_overlapped = self._schedule.is_overlapped(self.round_index)
        for fragment, steps in zip(fragments, self._steps, strict=True):
            fragment.prepare(self.round_index)
            pending = PendingRound(self.round_index, True, steps, statuses)
            fragment.begin(pending, is_overlapped)
            fragment.began_at = steps
        if not is_overlapped:
            for fragment, steps in zip(fragments, self._steps, strict=True):
                fragment.apply(steps)
        self.round_index += 1

    def _statuses(self, fragments: list[FragmentSync]) -> KnownStatuses:
        statuses = []
        for fragment, steps in zip(fragments, self._steps, strict=True):
            since = steps - fragment.began_at
            status = WorkerStatus(IN_ROUND, self.round_index, since, weight=1.0, finite=1.0)
            scalars = tuple(map(float, self.algorithm.scalars(fragment.state)))
            statuses.append(status._replace(scalars=scalars))
        return KnownStatuses(statuses, f"round {self.round_index}")

    @torch.no_grad()
    def drain(self) -> None:
        """Apply all pending rounds, as :meth:`Engine.drain` does."""
        for of_workers in self._fragments:
            for fragment, steps in zip(of_workers, self._steps, strict=True):
                fragment.apply(steps)

    def params(self) -> list[Tensor]:
        """Return a flat copy of each worker's parameters, ``(P,)``."""
        return [layout.new_flat() for layout in self._layouts]

    def consensus(self) -> Tensor:
        """Return the consensus parameters ``(P,)``: the mean over the workers."""
        return torch.stack(self.params()).mean(0)

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the workers' parameters to their mean."""
        params = torch.stack(self.params()).double()
        return math.sqrt(float((params - params.mean(0)).square().sum(1).mean()))


class Hub:
    """Collects the messages of all workers of one fragment, and returns the exchange's results.

    Here the whole message of a worker is one bucket. The exchange is applied to the buckets that
    processes would send, so that the numbers are the same.

    Args:
        exchange: The exchange whose ``simulate`` computes what each worker receives.
        num_workers: Number of workers N.
        bucket_elements: Maximum length of the buckets of processes, in elements.
        has_feedback: Whether the compression keeps what is lost of messages.
    """

    def __init__(
        self,
        exchange: Exchange,
        num_workers: int,
        bucket_elements: int,
        has_feedback: bool = False,
    ) -> None:
        self.exchange = exchange
        self.num_workers = num_workers
        self.has_feedback = has_feedback
        self._bucket_elements = bucket_elements
        self._rounds: dict[tuple[int, int], HubRound] = {}

    def of_worker(self, worker: int) -> HubExchange:
        """Return the exchange of one worker."""
        return HubExchange(self, worker)

    def round_of(self, bucket: Bucket, index: int) -> HubRound:
        """Return the messages of this bucket in a round; those of earlier rounds are deleted."""
        key = (index, bucket.start)
        if key not in self._rounds:
            chunks = [chunk.message for chunk in bucket.chunks]
            groups = group_chunks(chunks, len, self._bucket_elements)
            lengths = [sum(map(len, group)) for group in groups]
            self._rounds = {k: r for k, r in self._rounds.items() if k[0] == index}
            self._rounds[key] = HubRound(self, index, lengths)
        return self._rounds[key]


@dataclasses.dataclass
class HubRound:
    """The messages of one bucket in one round.

    Attributes:
        hub: The hub that the workers share.
        index: Index of the round.
        lengths: Lengths of the buckets that processes would send.
        messages: The messages by worker.
        received: What each worker receives; empty until :meth:`get` is called.
    """

    hub: Hub
    index: int
    lengths: list[int]
    messages: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    received: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have sent their messages."""
        return len(self.messages) == self.hub.num_workers

    def get(self, worker: int) -> Tensor:
        """Return what one worker receives; raises RuntimeError if a message is missing."""
        if not self.is_complete:
            raise RuntimeError("A simulated round ends before all workers have begun it.")
        if not self.received:
            workers, exchange = range(self.hub.num_workers), self.hub.exchange
            messages = [torch.split_with_sizes(self.messages[w], self.lengths) for w in workers]
            buckets = zip(*messages, strict=True)
            received = [exchange.simulate(bucket, self.index) for bucket in buckets]
            self.received = [torch.cat(parts, dim=-1) for parts in zip(*received, strict=True)]
        return self.received[worker]


class HubExchange(SeparateStatuses):
    """The exchange of one worker; what it receives is already divided by the total weight.

    Args:
        hub: The hub that the workers share.
        worker: Index of this worker.
    """

    def __init__(self, hub: Hub, worker: int) -> None:
        super().__init__(WorkerGroup(0, 1), Statistics())
        self._hub = hub
        self._worker = worker

    def start(self, bucket: Bucket, round_index: int) -> HubHandle:
        """Send a copy of the worker's message to the hub."""
        hub_round = self._hub.round_of(bucket, round_index)
        hub_round.messages[self._worker] = bucket.wire.clone()
        return HubHandle(hub_round, self._worker)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Return what each worker receives, given all messages in order of the workers."""
        return self._hub.exchange.simulate(messages, round_index)


class HubHandle(NamedTuple):
    """The handle of a bucket that a worker has sent to the hub."""

    hub_round: HubRound
    worker: int

    @property
    def lost(self) -> Tensor | None:
        """What the codec has lost of the worker's message, if the compression keeps it."""
        return self.hub_round.messages[self.worker] if self.hub_round.hub.has_feedback else None

    def has_arrived(self) -> bool:
        """Return whether all workers have sent their messages."""
        return self.hub_round.is_complete

    def wait(self) -> Tensor:
        """Return what this worker receives."""
        return self.hub_round.get(self.worker)

    def release(self) -> None:
        """Do nothing: the hub does not reuse memory."""
