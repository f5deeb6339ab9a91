"""Simulates any number of workers in one process, for tests, teaching and planning."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine, HasArrived
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.parameters.ownership import find_ownership
from lightning_loco.parameters.schema import check_model, first_difference
from lightning_loco.schedules import SyncEvery, by_steps
from lightning_loco.simulation.hub import Hub, VirtualClock
from lightning_loco.worker import Worker, exchanged_parameters, make_replica

Part = HasArrived | None
"""Whether what a worker waits for has arrived; None if it only lets others go first."""


class Simulation:
    """Runs the engines of all workers in one process, on a virtual clock.

    It makes the same rounds at the same local steps as the processes of a real run, and computes
    the same numbers; only the messages stay in memory. All workers start from the parameters of the
    first one. Time passes in local steps, at the speed of each worker; messages take none.

    Args:
        models: One module per worker, all with the same parameters.
        algorithm: What a round computes.
        sync_every: Local steps between rounds: one number, one per worker, or a mapping.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: The graph of gossip: a topology, a name, a graph or a matrix.
        compression: How messages are encoded, as in ``LocoStrategy``.
        speeds: Local steps per second of each worker. Default: local steps take no time, and
            workers take turns from round to round.

    Attributes:
        engines: The engine of each worker.
        algorithm: Prepared for these workers.
        settings: Prepared for these workers.

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
        speeds: Sequence[float] | None = None,
    ) -> None:
        schedule = by_steps(sync_every, overlap, warm_start)
        self._set_up(models, RoundSettings(algorithm, schedule, topology, compression), speeds)

    @classmethod
    def from_settings(
        cls,
        models: Sequence[nn.Module],
        settings: RoundSettings,
        *,
        speeds: Sequence[float] | None = None,
    ) -> Simulation:
        """Create a simulation with any schedule, compression and merge policy.

        Raises:
            ValueError: If the schedule follows the clock and there are no ``speeds``, or as in the
                class.
        """
        simulation = cls.__new__(cls)
        simulation._set_up(models, settings, speeds)  # noqa: SLF001
        return simulation

    def _set_up(
        self, models: Sequence[nn.Module], settings: RoundSettings, speeds: Sequence[float] | None
    ) -> None:
        if not models:
            raise ValueError("A simulation needs at least one model, one per worker; got none.")
        num_workers = len(models)
        self.settings = settings.prepare(num_workers, torch.initial_seed() % 2**31)
        self.algorithm = self.settings.algorithm
        self._step_s = _seconds_per_step(speeds, num_workers)
        if speeds is None and self.settings.schedule.sync_every_of(0) is None:
            raise ValueError(
                f"{self.settings.schedule} needs to know how long local steps take. Give speeds, "
                "the local steps per second of each worker."
            )
        self._clocks = [VirtualClock() for _ in models]
        workers = _make_workers(models, self.settings, self._clocks)
        self._hub = _make_hub(workers, self.settings)
        self.engines = [
            Engine.of_worker(worker, self.settings, self._hub.of_worker(number, clock))
            for number, (worker, clock) in enumerate(zip(workers, self._clocks, strict=True))
        ]
        self._unfinished: list[Iterator[Part]] = [iter(()) for _ in models]
        self._ended_s = 0.0

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self.engines)

    @property
    def round_index(self) -> int:
        """Number of rounds that all workers have begun."""
        return min(engine.worker.round_index for engine in self.engines)

    @property
    def steps(self) -> list[int]:
        """The local steps of each worker so far."""
        return [engine.worker.steps for engine in self.engines]

    @property
    def states(self) -> list[State]:
        """The algorithm's state of each worker, of the first fragment."""
        return [engine.fragments[0].state for engine in self.engines]

    @property
    def time_s(self) -> list[float]:
        """The time of each worker, in seconds from the start."""
        return [clock.time_s for clock in self._clocks]

    # ----------------------------------------------------------------------- training

    def run(
        self,
        local_step: Callable[[int], None],
        num_rounds: int | None = None,
        *,
        seconds: float | None = None,
    ) -> None:
        """Make local steps and the rounds that are due.

        Args:
            local_step: Called with the index of a worker; must make one optimizer step of its
                model.
            num_rounds: Rounds that each worker begins.
            seconds: Instead of rounds, time that passes; local steps that would end later are not
                made.

        Raises:
            ValueError: If both or neither are given, or ``seconds`` without speeds.
        """
        if (num_rounds is None) == (seconds is None):
            raise ValueError("Give num_rounds or seconds, and not both.")
        if seconds is not None and min(self._step_s) == 0:
            raise ValueError("Local steps take no time without speeds. Give num_rounds instead.")
        rounds = math.inf if num_rounds is None else self.round_index + num_rounds
        end_s = math.inf if seconds is None else self._ended_s + seconds

        def is_over(worker: int) -> bool:
            has_rounds = self.engines[worker].worker.round_index >= rounds
            return has_rounds or self._clocks[worker].time_s + self._step_s[worker] > end_s

        self._interleave([self._train(w, local_step, is_over) for w in range(self.num_workers)])
        self._ended_s = end_s if end_s < math.inf else max(self.time_s)

    def _train(
        self, worker: int, local_step: Callable[[int], None], is_over: Callable[[int], bool]
    ) -> Iterator[Part]:
        engine, clock, step_s = self.engines[worker], self._clocks[worker], self._step_s[worker]
        yield from self._finish_round(worker)
        while not is_over(worker):
            if step_s:
                clock.advance_to(clock.time_s + step_s)
                yield None
            local_step(worker)
            engine.count_step()
            if engine.is_due:
                self._unfinished[worker] = engine.round_in_parts()
                yield from self._finish_round(worker)
                yield None

    def _finish_round(self, worker: int) -> Iterator[Part]:
        """Go on with a round that may have been waiting when the last run ended."""
        for part in self._unfinished[worker]:  # noqa: UP028  # `yield from` would close it
            yield part

    def make_round(self) -> None:
        """Begin one round of all workers, at once."""
        for engine in self.engines:
            for fragment in engine.fragments:
                fragment.fresh_at = -1  # the caller has moved the parameters, if anyone
        self._interleave([engine.round_in_parts() for engine in self.engines])

    def drain(self) -> None:
        """Apply all pending rounds; workers that have begun fewer rounds begin the missing ones."""
        most = max(engine.worker.round_index for engine in self.engines)
        self._interleave([self._drain(w, most) for w in range(self.num_workers)])

    def _drain(self, worker: int, num_rounds: int) -> Iterator[Part]:
        engine = self.engines[worker]
        yield from self._finish_round(worker)
        while engine.worker.round_index < num_rounds:
            yield from engine.round_in_parts()
        yield from engine.apply_all_in_parts()

    def _interleave(self, parts: Sequence[Iterator[Part]]) -> None:
        """Run what each worker does, always the one whose time is first.

        A worker that waits goes on when what it waits for has arrived, at the time when it has.
        """
        order = itertools.count()
        ready = [(clock.time_s, next(order), w) for w, clock in enumerate(self._clocks)]
        heapq.heapify(ready)
        waiting: dict[int, HasArrived] = {}

        def resume(worker: int, time_s: float) -> None:
            self._clocks[worker].advance_to(time_s)
            heapq.heappush(ready, (self._clocks[worker].time_s, next(order), worker))

        while ready:
            now_s, _, worker = heapq.heappop(ready)
            for part in itertools.islice(parts[worker], 1):
                if part is None:
                    resume(worker, now_s)
                else:
                    waiting[worker] = part
                    self._hub.reached.add(worker)
            reached, self._hub.reached = self._hub.reached, set()
            for other in [w for w in waiting if w in reached and waiting[w]()]:
                del waiting[other]
                resume(other, now_s)

    # ------------------------------------------------------------------------ results

    def params(self) -> list[Tensor]:
        """Return a flat copy of each worker's parameters, ``(P,)``."""
        return [engine.worker.replica.layout.new_flat() for engine in self.engines]

    def consensus(self) -> Tensor:
        """Return the consensus parameters ``(P,)``: the mean over the workers."""
        return torch.stack(self.params()).mean(0)

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the workers' parameters to their mean."""
        params = torch.stack(self.params()).double()
        return math.sqrt(float((params - params.mean(0)).square().sum(1).mean()))


def _seconds_per_step(speeds: Sequence[float] | None, num_workers: int) -> list[float]:
    if speeds is None:
        return [0.0] * num_workers
    if len(speeds) != num_workers or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            "speeds are the local steps per second of each worker, all positive, got "
            f"{list(speeds)} for {num_workers} workers."
        )
    return [1 / speed for speed in speeds]


def _make_workers(
    models: Sequence[nn.Module], settings: RoundSettings, clocks: Sequence[VirtualClock]
) -> list[Worker]:
    workers: list[Worker] = []
    for number, (model, clock) in enumerate(zip(models, clocks, strict=True)):
        check_model(model)
        named, group = exchanged_parameters(model), WorkerGroup(number, len(models), clock=clock)
        slices = settings.fragment_slices({name: p.numel() for name, p in named.items()})
        ownership = find_ownership(named, slices, settings.granularity, group)
        replica = make_replica(model, settings, named, ownership)
        schema = replica.layout.schema()
        if workers and schema != (first := workers[0].replica.layout.schema()):
            raise ValueError(
                f"Worker {number} holds a different model than worker 0: "
                f"{first_difference(schema, first)}. Build the same model for every worker."
            )
        model.load_state_dict(models[0].state_dict())
        workers.append(Worker(group, replica, checksum=0))
    return workers


def _make_hub(workers: Sequence[Worker], settings: RoundSettings) -> Hub:
    layout = workers[0].replica.layout
    alone = WorkerGroup(0, 1), Statistics()
    exchange = make_exchange(settings.algorithm, *alone, settings.topology, settings.compression)
    has_feedback = settings.compression is not None and settings.compression.has_feedback
    longest = settings.bucket_elements(layout.numel, layout.dtype.itemsize)
    return Hub(exchange, len(workers), longest, has_feedback)
