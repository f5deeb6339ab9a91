"""Run any algorithm with any number of workers in one process, for tests, teaching and planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import IN_ROUND, KnownStatuses, WorkerStatus
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.fragment_sync import FragmentSync, PendingRound
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.parameters.flat import FlatLayout
from lightning_loco.parameters.schema import check_model, first_difference
from lightning_loco.schedules import StepInfo, SyncEvery, by_steps
from lightning_loco.simulation.hub import Hub


class Simulation:
    """Workers that take turns: local steps of each, then one round of all.

    Computes what the processes of a real run compute, in the same order; only the exchange is
    replaced by its :meth:`simulate`. Every worker starts from the parameters of the first one.

    Args:
        models: One module per worker, all alike.
        algorithm: What a round computes.
        sync_every: Local steps between rounds, or one number per worker, or as it changes.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: Neighbours, for gossip: a topology, a name, a graph or a matrix.
        compression: How messages are written on the wire, as in ``LocoStrategy``.

    Attributes:
        states: The algorithm's state of each worker.
        round_index: Number of completed rounds.

    Raises:
        ValueError: If there is no model, or the settings do not fit.

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
        """A simulation of any schedule that goes by steps, with any codec and landing.

        Raises:
            ValueError: If the schedule goes by the clock, or as in the class.
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
        """The fragments of all workers, by fragment and worker; those of a row share one hub."""
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
            row = []
            for worker, layout in enumerate(layouts):
                state, residual = states[worker], residuals[worker]
                memory = FragmentMemory(layout, slices, settings, state, residual, layout.numel)
                row.append(FragmentSync(memory, settings, hub.of_worker(worker)))
            fragments.append(row)
        return fragments

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._layouts)

    def run(self, local_step: Callable[[int], None], num_rounds: int) -> None:
        """Alternate local phases and rounds.

        Args:
            local_step: Called with the number of a worker; makes one optimizer step of its model.
            num_rounds: How many rounds to make.
        """
        for _ in range(num_rounds):
            for worker in range(self.num_workers):
                since_round = 0
                while not self._turn(worker, since_round):
                    local_step(worker)
                    self._steps[worker] += 1
                    since_round += 1
            self.make_round()

    @torch.no_grad()
    def _turn(self, worker: int, since_round: int) -> bool:
        """Apply the pending rounds of a worker that end now; whether it is to begin a round."""
        schedule, begins = self._schedule.of_worker(worker), False
        for index, row in enumerate(self._fragments):
            fragment = row[worker]
            counts = self._steps[worker], since_round, self.round_index
            begin, end = schedule.due(StepInfo(*counts, index, math.inf, fragment.pending))
            begins = begins or begin
            if end and not begin:
                fragment.apply()
        return begins

    @torch.no_grad()
    def make_round(self) -> None:
        """Exchange and apply, for all workers."""
        fragments = self._fragments[self.round_index % len(self._fragments)]
        statuses = self._statuses(fragments)
        is_overlapped = self._schedule.is_overlapped(self.round_index)
        for fragment, steps in zip(fragments, self._steps, strict=True):
            fragment.prepare()
            pending = PendingRound(self.round_index, True, steps, statuses)
            fragment.begin(pending, is_overlapped)
        if not is_overlapped:
            for fragment in fragments:
                fragment.apply()
        self.round_index += 1

    def _statuses(self, fragments: list[FragmentSync]) -> KnownStatuses:
        status = WorkerStatus(IN_ROUND, self.round_index, steps=1, weight=1.0, finite=1.0)
        found = [self.algorithm.scalars(fragment.state) for fragment in fragments]
        statuses = [status._replace(scalars=tuple(map(float, numbers))) for numbers in found]
        return KnownStatuses(statuses, f"round {self.round_index}")

    @torch.no_grad()
    def drain(self) -> None:
        """Apply what overlap has left under way, as :meth:`Engine.drain` does."""
        for row in self._fragments:
            for fragment in row:
                fragment.apply()

    def params(self) -> list[Tensor]:
        """A flat copy of each worker's parameters, ``(P,)``."""
        return [layout.new_flat() for layout in self._layouts]

    def consensus(self) -> Tensor:
        """The consensus parameters ``(P,)``: the mean over the workers."""
        return torch.stack(self.params()).mean(0)

    def consensus_distance(self) -> float:
        """Root mean square distance of the workers' parameters to their mean."""
        params = torch.stack(self.params()).double()
        return math.sqrt(float((params - params.mean(0)).square().sum(1).mean()))
