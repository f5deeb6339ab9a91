"""Simulates any number of workers in one process, for tests, teaching and planning."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco._util.goodput import Goodput
from lightning_loco.algorithms import Algorithm
from lightning_loco.costs import LinkLike, LinkTimes, as_links
from lightning_loco.costs.method_costs import StepTimes
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.fragment_sync import HasArrived
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.schedules import SyncEvery, by_steps
from lightning_loco.simulation.checks import check_length, copy_first
from lightning_loco.simulation.failures import Failure
from lightning_loco.simulation.family import Family, make_worker
from lightning_loco.simulation.goodput import MergeSummary
from lightning_loco.simulation.learners import Learners
from lightning_loco.simulation.messages import VirtualClock
from lightning_loco.simulation.pulls import Pulls
from lightning_loco.simulation.rounds import Rounds
from lightning_loco.simulation.timeline import LossPoint, Timeline, TimelineEvent, WorkerCosts
from lightning_loco.syncer.merge_rounds import Merge
from lightning_loco.syncer.settings import DecoupledSettings
from lightning_loco.syncer.syncer import Syncer

SimulatedSettings = RoundSettings | PairwiseSettings | DecoupledSettings
"""The settings of a method that can be simulated."""

FAMILIES: dict[type, Any] = {
    RoundSettings: Rounds,
    PairwiseSettings: Pulls,
    DecoupledSettings: Learners,
}
"""The family of each kind of settings."""

Part = HasArrived | None
"""Returns whether a waiting worker may continue; None if the worker only yields its turn."""

LocalStep = Callable[[int], Any]
"""Takes a local step of the worker with this index; may return the training loss."""

EventKind = Literal["run", "arrival", "death", "noticed", "return"]

_FAILURES = ("death", "noticed", "return")


class _Event(NamedTuple):
    """An event of one worker. Events at the same time keep their order.

    Attributes:
        time_s: Time of the event.
        order: Number of the event.
        worker: Index of the worker.
        kind: ``"run"``: the worker continues; ``"arrival"``: its messages may have arrived;
            ``"death"``, ``"noticed"``, ``"return"``: events of a failure.
        life: Deaths of the worker before the event was planned.
    """

    time_s: float
    order: int
    worker: int
    kind: EventKind
    life: int = 0


class Simulation:
    """Runs the participants of all workers in one process, on a virtual clock.

    Rounds begin at the same local steps as in the processes of a real run, and compute the same
    numbers; only the messages stay in memory. All workers start from the parameters of the first
    one. Time passes in local steps, at the speed of each worker, and while messages are on their
    links: an all-reduce waits for the slowest link, gossip for the neighbors, and each link sends
    one message after the other.

    With ``failures`` workers die and come back, like members of an elastic run. Once the others
    have noticed a death, rounds continue without that worker. A worker that returns takes the state
    of another one, and takes part in its first round with weight 0.

    Args:
        models: One module per worker, all with the same parameters.
        algorithm: The algorithm of the rounds.
        sync_every: Local steps between rounds: one number, one per worker, or a mapping.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: The graph of gossip: a topology, a name, a graph or a matrix.
        compression: How messages are encoded, as in ``LocoStrategy``.
        speeds: Local steps per second of each worker. Default: local steps take no time, and
            workers take turns from round to round.
        jitter: Largest relative change of the duration of a local step, from 0 to less than 1; see
            :class:`~lightning_loco.costs.method_costs.StepTimes`.
        links: Links of the workers, as in ``LocoStrategy(link=...)``. Default: messages take no
            time.
        failures: When workers die and come back.
        seed: Seed of the jitter, and of the choice of peers in pairwise gossip.

    Attributes:
        algorithm: The algorithm, prepared for these workers.
        settings: The settings, prepared for these workers.

    Raises:
        ValueError: If there is no model, or the settings are invalid for these workers.

    Example:
        >>> import torch
        >>> from lightning_loco.algorithms import LocalSGD
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> simulation = Simulation(models, LocalSGD(), speeds=[1.0, 0.5], links="wan")
        >>> def local_step(worker):
        ...     models[worker].weight.data.fill_(float(worker))
        >>> simulation.run(local_step, num_rounds=1)
        >>> [model.weight.item() for model in models]
        [0.5, 0.5]
        >>> [round(costs.utilisation, 2) for costs in simulation.costs]
        [0.48, 0.97]
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
        jitter: float = 0.0,
        links: LinkLike | None = None,
        failures: Sequence[Failure] = (),
        seed: int = 0,
    ) -> None:
        schedule = by_steps(sync_every, overlap, warm_start)
        settings = RoundSettings(algorithm, schedule, topology, compression)
        self._set_up(models, settings, speeds, jitter, links, failures, seed)

    @classmethod
    def from_settings(
        cls,
        models: Sequence[nn.Module],
        settings: SimulatedSettings,
        *,
        speeds: Sequence[float] | None = None,
        jitter: float = 0.0,
        links: LinkLike | None = None,
        failures: Sequence[Failure] = (),
        seed: int = 0,
    ) -> Simulation:
        """Create a simulation with any schedule, compression and merge policy, or without rounds.

        With ``DecoupledSettings`` there is a syncer beside worker 0; see :attr:`syncer`,
        :attr:`merge_summary` and :attr:`goodput`.

        With ``PairwiseSettings``, workers fetch the parameters of random peers before local steps,
        and blend them in after the first local step at whose end they have arrived. ``links``
        default to the links in the settings.

        Raises:
            ValueError: If the schedule follows the clock, or there are no rounds, and no
                ``speeds``; if there are ``failures`` in pairwise gossip; or as in the class.
        """
        simulation = cls.__new__(cls)
        simulation._set_up(  # noqa: SLF001
            models, settings, speeds, jitter, links, failures, seed
        )
        return simulation

    def _set_up(
        self,
        models: Sequence[nn.Module],
        settings: SimulatedSettings,
        speeds: Sequence[float] | None,
        jitter: float,
        links: LinkLike | None,
        failures: Sequence[Failure],
        seed: int,
    ) -> None:
        if not models:
            raise ValueError("A simulation needs at least one model, one per worker; got none.")
        num_workers = len(models)
        family = FAMILIES[type(settings)]
        known = settings.link if links is None else as_links(links)
        self.settings: Any = family.prepare(
            dataclasses.replace(settings, link=None),
            num_workers,
            failures,
            torch.initial_seed() % 2**31,
        )
        self.algorithm: Algorithm = self.settings.algorithm
        self._step_times = make_step_times(speeds, num_workers, jitter, seed)
        if known is not None:
            known.check(num_workers)
        times = None if known is None else LinkTimes(known, num_workers)
        self._clocks = [VirtualClock() for _ in models]
        self._timeline = Timeline(num_workers)
        copy_first(models)
        workers = [
            make_worker(model, WorkerGroup(number, num_workers, clock=clock), self.settings)
            for number, (model, clock) in enumerate(zip(models, self._clocks, strict=True))
        ]
        admit = self._admit if failures else None
        self._family: Family = family(workers, self.settings, times, self._timeline, seed, admit)
        if speeds is None and self.sync_every is None:
            raise ValueError(
                f"{type(self.algorithm).__name__} needs to know how long local steps take. Give "
                "speeds, the local steps per second of each worker."
            )
        self._made = [0] * num_workers
        self._alive, self._returned = set(range(num_workers)), set[int]()
        self._lives = [0] * num_workers
        self._admits = False
        self._order = itertools.count()
        self._failures = [
            self._event(time_s, failure.worker, kind)
            for failure in failures
            for kind, time_s in failure.events()
        ]
        self._unfinished: list[Iterator[Part]] = [*map(self._family.begin, range(num_workers))]
        self._joining = set(range(num_workers))
        self._waiting: dict[int, HasArrived] = {}
        self._interrupted: dict[int, HasArrived] = {}  # waits that the last call has not ended
        self._waiting_since = [0.0] * num_workers
        self._later: list[tuple[float, int]] = []
        self._ended_s = 0.0
        for participant in self.participants:
            participant.before_step()

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._clocks)

    @property
    def participants(self) -> Sequence[LocalParticipant]:
        """The participant of each worker, such as its engine."""
        return self._family.participants

    @property
    def sync_every(self) -> int | None:
        """Local steps between rounds of worker 0; None if time decides."""
        return self._family.sync_every

    @property
    def round_index(self) -> int:
        """Number of rounds that all living workers have begun."""
        begun = [self.participants[worker].worker.round_index for worker in self._alive]
        return min(begun, default=0)

    @property
    def steps(self) -> list[int]:
        """Local steps of each worker so far; a returned worker continues the count of the run."""
        return [participant.worker.steps for participant in self.participants]

    @property
    def time_s(self) -> list[float]:
        """The time of each worker, in seconds from the start."""
        return [clock.time_s for clock in self._clocks]

    # ----------------------------------------------------------------------- training

    def run(
        self,
        local_step: LocalStep,
        num_rounds: int | None = None,
        *,
        seconds: float | None = None,
        on_return: Callable[[int], None] | None = None,
    ) -> None:
        """Take local steps and run the rounds that are due.

        Args:
            local_step: Called with the index of a worker; must take one optimizer step of its
                model. It may return the loss, for :attr:`losses`.
            num_rounds: Rounds that each worker begins.
            seconds: Virtual time to run for, instead of rounds; local steps that would end later
                are not taken.
            on_return: Called with the index of a worker that has come back and received the state,
                to make a new optimizer, for example.

        Raises:
            TypeError: If ``num_rounds`` is not an integer.
            ValueError: If both or neither are given, or ``seconds`` is not finite or given without
                speeds.
            RuntimeError: If all workers are dead.
        """
        check_length(num_rounds, seconds, self._step_times.step_s)
        if num_rounds is not None and not self._family.has_rounds:
            raise ValueError(f"{type(self.algorithm).__name__} has no rounds. Give seconds.")
        rounds = math.inf if num_rounds is None else self.round_index + num_rounds
        end_s = math.inf if seconds is None else self._ended_s + seconds

        def is_over(worker: int) -> bool:
            if self.participants[worker].worker.round_index >= rounds:
                return True
            return self._clocks[worker].time_s + self._step_s(worker) > end_s

        def train(worker: int) -> Iterator[Part]:
            return self._train(worker, local_step, is_over)

        def come_back(worker: int) -> Iterator[Part]:
            yield from self._join(worker)
            if on_return is not None:
                on_return(worker)
            yield from train(worker)

        self._interleave(train, end_s, come_back)
        self._ended_s = end_s if end_s < math.inf else max(self.time_s)
        dead = set(range(self.num_workers)) - self._alive - self._returned
        for worker in dead if end_s < math.inf else ():
            self._be_away(worker, end_s)
        self._family.finish_run(self._ended_s)

    def _step_s(self, worker: int) -> float:
        """Duration of the next local step of a worker, in seconds."""
        return self._step_times.seconds(worker, self._made[worker])

    def _train(
        self, worker: int, local_step: LocalStep, is_over: Callable[[int], bool]
    ) -> Iterator[Part]:
        participant, clock = self.participants[worker], self._clocks[worker]
        yield from self._finish_round(worker)
        self._joining.discard(worker)
        while not is_over(worker):
            if step_s := self._step_s(worker):
                began_s = clock.time_s
                clock.advance_to(began_s + step_s)
                yield None
                self._timeline.add(worker, "compute", began_s, clock.time_s)
            loss = local_step(worker)
            self._made[worker] += 1
            participant.count_step()
            steps = participant.worker.steps
            loss = self._timeline.add_loss(worker, steps, clock.time_s, loss)
            if loss is not None:
                participant.worker.last_loss = loss
            if participant.check_due():
                self._unfinished[worker] = participant.round_in_parts()
                yield from self._finish_round(worker)
                if not step_s:
                    yield None  # or the others would never have their turn
            participant.before_step(loss)

    def _finish_round(self, worker: int) -> Iterator[Part]:
        """Continue with a round that may have been waiting when the last run ended."""
        if (waiting := self._interrupted.pop(worker, None)) is not None:
            yield waiting
        for part in self._unfinished[worker]:  # noqa: UP028  # `yield from` would close it
            yield part

    def make_round(self) -> None:
        """Begin one round of all workers, at once."""
        self._interleave(self._family.begin_round)

    def drain(self) -> None:
        """Apply all pending rounds; workers that have begun fewer rounds begin the missing ones."""
        # One that waits is in a round that it has begun, or will begin when the wait is over.
        most = max(
            self.participants[worker].worker.round_index + (worker in self._waiting)
            for worker in self._alive
        )

        def drain(worker: int) -> Iterator[Part]:
            yield from self._finish_round(worker)
            yield from self._family.drain(worker, most)

        self._interleave(drain)

    # ------------------------------------------------------------------ the virtual clock

    def _event(self, time_s: float, worker: int, kind: EventKind) -> _Event:
        return _Event(time_s, next(self._order), worker, kind, self._lives[worker])

    def _interleave(
        self,
        begin: Callable[[int], Iterator[Part]],
        end_s: float = math.inf,
        come_back: Callable[[int], Iterator[Part]] | None = None,
    ) -> None:
        """Advance all workers, always the one with the earliest time.

        A waiting worker continues at the time at which its messages arrive.

        Args:
            begin: Returns the work of a worker.
            end_s: Failures after this time are left for the next call.
            come_back: Returns the work of a worker that has come back. Default: it waits for the
                next call.
        """
        self._admits = come_back is not None
        # No message may wake a worker that has not begun in this call.
        self._interrupted |= self._waiting
        self._waiting.clear()
        parts = {worker: begin(worker) for worker in sorted(self._alive)}
        if come_back is not None:
            parts |= {worker: come_back(worker) for worker in sorted(self._returned)}
        events = [self._event(self._clocks[w].time_s, w, "run") for w in parts]
        events += [event for event in self._failures if event.time_s <= end_s]
        self._failures = [event for event in self._failures if event.time_s > end_s]
        events += [self._event(time_s, worker, "arrival") for time_s, worker in self._later]
        self._later = []
        heapq.heapify(events)

        def plan(time_s: float, worker: int, kind: EventKind) -> None:
            heapq.heappush(events, self._event(time_s, worker, kind))

        while self._has_event(events, end_s):
            event = heapq.heappop(events)
            now_s, _, worker, kind, life = event
            clock = self._clocks[worker]
            if kind in _FAILURES:
                runs = any(other.kind == "run" for other in events)
                if self._alive and not runs and not self._waiting.keys() & self._alive:
                    self._failures.append(event)
                    continue
                if kind == "return" and come_back is not None:
                    parts[worker] = come_back(worker)
                self._fail(worker, kind, now_s)
                if kind == "return" and worker in parts:
                    plan(now_s, worker, "run")
                elif kind == "death":
                    parts.pop(worker, None)
            elif life == self._lives[worker] and worker in parts:
                if kind == "arrival":
                    if worker not in self._waiting:
                        if now_s > clock.time_s:  # it has stopped, and may wait in the next call
                            self._later.append((now_s, worker))
                        continue
                    clock.advance_to(now_s)
                    if not self._waiting[worker]():
                        continue
                    del self._waiting[worker]
                    self._add_wait(worker, now_s)
                for part in itertools.islice(parts[worker], 1):
                    if part is None:
                        plan(clock.time_s, worker, "run")
                    else:
                        self._waiting[worker] = part
                        self._waiting_since[worker] = clock.time_s
                        self._family.wakeups.append((clock.time_s, worker))
            self._plan_wakeups(events)

    def _plan_wakeups(self, events: list[_Event]) -> None:
        for time_s, worker in self._family.wakeups:
            heapq.heappush(events, self._event(time_s, worker, "arrival"))
        self._family.wakeups.clear()

    def _has_event(self, events: list[_Event], end_s: float) -> bool:
        """Do what happens in the background before the next event; return whether there is one."""
        family = self._family
        while events or self._waiting:
            due_s = family.background_s
            if events and events[0].time_s < due_s:
                family.run_background(events[0].time_s)
                return True
            if not events and (due_s > end_s or due_s == math.inf):
                return False
            family.run_background(due_s)
            self._plan_wakeups(events)
        return False

    def _add_wait(self, worker: int, now_s: float) -> None:
        kind: Literal["join", "wait"] = "join" if worker in self._joining else "wait"
        since_s, statistics = self._waiting_since[worker], self.participants[worker].statistics
        self._timeline.add(worker, kind, since_s, now_s)
        if kind == "wait":
            statistics.count_wait(since_s, now_s)

    # --------------------------------------------------------------------- failures

    def _fail(self, worker: int, kind: EventKind, now_s: float) -> None:
        """Handle an event of a failure."""
        family = self._family
        if kind == "death":
            self._alive.discard(worker)
            self._returned.discard(worker)
            self._lives[worker] += 1
            self._clocks[worker].time_s = now_s
            if (self._waiting.pop(worker, None) or self._interrupted.pop(worker, None)) is not None:
                self._add_wait(worker, now_s)
            self._unfinished[worker] = iter(())
            family.lose(worker, now_s)
        elif kind == "noticed":
            family.notice(worker, now_s)
        elif kind == "return":
            self._be_away(worker, now_s)
            self._returned.add(worker)
            self._joining.add(worker)

    def _be_away(self, worker: int, until_s: float) -> None:
        self._timeline.add(worker, "away", self._clocks[worker].time_s, until_s)
        self._clocks[worker].advance_to(until_s)

    def _join(self, worker: int) -> Iterator[Part]:
        """Wait until the worker is admitted, and for the state of the run."""
        clock = self._clocks[worker]
        self._family.welcome(worker, clock.time_s)
        yield lambda: worker in self._alive
        self._unfinished[worker] = self._family.rejoin(worker)
        yield from self._finish_round(worker)
        began_s = clock.time_s
        clock.advance_to(began_s + self._family.join_s[worker])
        self._timeline.add(worker, "join", began_s, clock.time_s)

    def _admit(self, now_s: float) -> list[int]:
        """Return the workers that have come back and are to join in the round that begins."""
        joining = sorted(self._returned) if self._admits else []
        self._returned.difference_update(joining)
        self._alive.update(joining)
        return joining

    # ------------------------------------------------------------------------ results

    @property
    def losses(self) -> list[LossPoint]:
        """Losses that ``local_step`` has returned, in the order of virtual time."""
        return self._timeline.losses

    @property
    def timeline(self) -> list[TimelineEvent]:
        """Events of all workers with their times; consecutive local steps are one event."""
        return list(self._timeline.events)

    @property
    def costs(self) -> list[WorkerCosts]:
        """Steps, rounds, bytes and times of each worker so far."""
        return [
            WorkerCosts(
                worker,
                self._made[worker],
                self._family.rounds_of(worker),
                self.participants[worker].statistics.bytes_sent,
                self._clocks[worker].time_s,
                seconds["compute"],
                seconds["wait"],
                seconds["join"],
                seconds["away"],
            )
            for worker, seconds in enumerate(self._timeline.seconds)
        ]

    @property
    def syncer(self) -> Syncer | None:
        """The syncer of decoupled learners; None for other methods."""
        return self._family.syncer

    @property
    def merges(self) -> Sequence[Merge]:
        """The merges that the syncer has published, in their order; none for other methods."""
        return self._family.merges

    @property
    def merge_summary(self) -> MergeSummary | None:
        """Number, pace and pushes of the merges; None without a merge, or for other methods."""
        if not self.merges:
            return None
        made = [costs.steps for costs in self.costs]
        fragments = len(self.syncer.contract.lengths) if self.syncer is not None else 1
        return MergeSummary.of(self.merges, made, fragments)

    @property
    def goodput(self) -> list[Goodput]:
        """What the time of each decoupled learner was for; empty for other methods."""
        found = []
        for costs in self.costs:
            counted = self._family.counted_steps(costs.worker)
            if counted is None or costs.time_s == 0:
                return []
            found.append(Goodput.of(costs.spent, counted))
        return found

    def params(self) -> list[Tensor]:
        """Return a flat copy of each worker's parameters, ``(P,)``."""
        return [one.worker.replica.layout.new_flat() for one in self.participants]

    def consensus(self) -> Tensor:
        """Return the consensus parameters ``(P,)``: the mean over the living workers.

        If all learners of a syncer are dead, it is :meth:`outer`.
        """
        return self._living_params().mean(0) if self._alive else self.outer()

    def outer(self) -> Tensor:
        """Return the parameters ``(P,)`` of the syncer; RuntimeError if there is none."""
        if (syncer := self.syncer) is None:
            raise RuntimeError(f"{type(self.algorithm).__name__} has no syncer. Use consensus().")
        fragments = range(len(syncer.contract.lengths))
        return torch.cat([syncer.fetch(fragment).params for fragment in fragments])

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the workers' parameters to their mean."""
        params = self._living_params().double()
        return math.sqrt(float((params - params.mean(0)).square().sum(1).mean()))

    def _living_params(self) -> Tensor:
        params, present = self.params(), (self._alive - self._joining) or self._alive
        return torch.stack([params[worker] for worker in sorted(present)])


def make_step_times(
    speeds: Sequence[float] | None, num_workers: int, jitter: float, seed: int
) -> StepTimes:
    """Return the durations of local steps; ValueError unless each worker has a speed."""
    if speeds is None:
        return StepTimes([0.0] * num_workers, jitter, seed)
    if len(speeds) != num_workers or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            "speeds are the local steps per second of each worker, all positive, got "
            f"{list(speeds)} for {num_workers} workers."
        )
    return StepTimes([1 / speed for speed in speeds], jitter, seed)
