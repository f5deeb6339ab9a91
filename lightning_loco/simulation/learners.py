"""Decoupled learners in the simulation: an engine per worker, and the syncer of all of them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_loco._util.decisions import Decision
from lightning_loco._util.goodput import Counted
from lightning_loco.costs import Link
from lightning_loco.engine.fragment_sync import HasArrived
from lightning_loco.model.worker import Worker
from lightning_loco.simulation.failures import Failure, MembersOfSimulation
from lightning_loco.simulation.family import Family, make_worker
from lightning_loco.simulation.goodput import MergedSteps
from lightning_loco.simulation.messages import VirtualClock
from lightning_loco.syncer.engine import LearnerEngine
from lightning_loco.syncer.learner import POLL_S, SHORTEST_PAUSE_S, Do
from lightning_loco.syncer.merge_rounds import Merge, Refused
from lightning_loco.syncer.settings import DecoupledSettings
from lightning_loco.syncer.syncer import Syncer

_NO_TIME = Link(math.inf)


class Learners(Family):
    """The engines of all workers, whose requests travel to one syncer in the background.

    The syncer is beside worker 0, as within a job, and does not die. A request takes the latency of
    the learner's link and the time of its bytes, and so does the reply; the requests of a learner
    follow each other, and those of several learners do not share the syncer's link. A merge takes
    no time.
    """

    participants: list[LearnerEngine]
    settings: DecoupledSettings
    syncer: Syncer
    has_rounds = False

    def make_participants(self, workers: Sequence[Worker]) -> list[LearnerEngine]:
        """Make an engine for each worker, and the syncer."""
        self.clock = VirtualClock()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._advances_at = math.inf
        engines = [LearnerEngine.of_worker(worker, self.settings) for worker in workers]
        contract = engines[0].contract
        self._merged = MergedSteps(contract.settings.fragments)
        self.syncer = Syncer(contract, on_merge=self._note_merge, clock=self.clock)
        self._processes: list[LearnerProcess | None] = [None] * len(workers)
        return engines

    @staticmethod
    def prepare(
        settings: DecoupledSettings, num_workers: int, failures: Sequence[Failure], seed: int
    ) -> DecoupledSettings:
        """Check the settings; ValueError for what is not simulated."""
        if settings.syncer is not None:
            raise ValueError("Simulated learners have a syncer of their own. Drop syncer.")
        MembersOfSimulation(tuple(failures)).check(num_workers)
        return settings.prepare(num_workers, seed)

    def link_of(self, worker: int) -> Link:
        """Return the link between a worker and the syncer; worker 0 is beside it."""
        if self.times is None or worker == 0:
            return _NO_TIME
        return self.times.links.of_size(self.times.num_workers).between(worker, 0)

    # ------------------------------------------------------------- joining and dying

    def begin(self, worker: int) -> Iterator[HasArrived]:
        """Join the run: wait until all parameters have arrived, and take them."""
        engine, before = self.participants[worker], self._processes[worker]
        generation = 1 if before is None else before.generation + 1
        process = LearnerProcess(self, worker, engine, generation)
        self._processes[worker] = process
        process.start()
        yield process.is_ready
        engine.begin()

    def lose(self, worker: int, now_s: float) -> None:
        """End the process of a worker; the syncer does not notice before its lease is over."""
        if (process := self._processes[worker]) is not None:
            process.is_alive = False

    def welcome(self, worker: int, now_s: float) -> None:
        """Make a new process of a worker, which joins at once."""
        assert self.admit is not None
        before = self.participants[worker].worker
        new = make_worker(before.replica.model, before.group, self.settings)
        new.statistics, new.steps = before.statistics, before.steps
        self.participants[worker] = LearnerEngine.of_worker(new, self.settings)
        self.admit(now_s)

    def counted_steps(self, worker: int) -> Counted:
        """Return the local steps of a worker in merges, and those that may come to be in one."""
        process, name = self._processes[worker], self.settings.learner_name(worker)
        rounds = process.rounds if process is not None and process.is_alive else None
        return self._merged.of_learner(name, rounds, self.syncer)

    def _note_merge(self, merge: Merge) -> None:
        self.merges.append(merge)
        self._merged.add(merge)

    # ------------------------------------------------------------- the virtual clock

    def at(self, time_s: float, act: Callable[[], object]) -> None:
        """Do something in the background at a time."""
        heapq.heappush(self._events, (time_s, next(self._order), act))

    @property
    def background_s(self) -> float:
        """Time of the next event in the background."""
        return self._events[0][0] if self._events else math.inf

    def run_background(self, until_s: float) -> None:
        """Do what happens in the background until then."""
        while self._events and self._events[0][0] <= until_s:
            time_s, _, act = heapq.heappop(self._events)
            self.clock.advance_to(time_s)
            act()
        if until_s < math.inf:
            self.clock.advance_to(until_s)

    def finish_run(self, end_s: float) -> None:
        """Do what happens in the background until the end of a run."""
        self.run_background(end_s)

    def wait_for_syncer(self) -> None:
        """Call the syncer again when something is due."""
        wait_s = self.syncer.advance()
        at_s = math.inf if wait_s is None else self.clock.time_s + wait_s
        if at_s < self._advances_at:
            self._advances_at = at_s
            self.at(at_s, self._advance)

    def _advance(self) -> None:
        if self.clock.time_s >= self._advances_at:
            self._advances_at = math.inf
            self.wait_for_syncer()


class LearnerProcess:
    """The background of a simulated learner: it carries out its exchanges on the virtual clock.

    Attributes:
        generation: Of this process.
        is_alive: Whether the worker has not died since.
        rounds: The counters of the learner.
    """

    def __init__(
        self, learners: Learners, worker: int, engine: LearnerEngine, generation: int
    ) -> None:
        self.generation, self.is_alive = generation, True
        self._learners, self._worker, self._engine = learners, worker, engine
        self._link = learners.link_of(worker)
        self._learner = engine.make_learner(generation, "the simulated syncer")
        self._learner.wake = self._wake
        self.rounds = self._learner.rounds
        self._exchange: Decision[Do, None] | None = None
        self._is_woken = self._was_ready = False
        self._pauses = 0

    def start(self) -> None:
        """Begin with the first exchange."""
        self._later(0.0, self._begin_exchange)

    def is_ready(self) -> bool:
        """Return whether the parameters of the run have arrived."""
        return self._learner.is_ready.is_set()

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        def act_if_alive() -> None:
            if self.is_alive:
                act()

        self._learners.at(self._learners.clock.time_s + seconds, act_if_alive)

    def _begin_exchange(self) -> None:
        self._is_woken = False
        self._exchange = exchange = self._learner.exchange()
        self._go_on(lambda: next(exchange))

    def _go_on(self, decide: Callable[[], tuple[Do, Any]]) -> None:
        """Send the next request of the exchange, or pause after its end."""
        try:
            what, arguments = decide()
        except StopIteration:
            self._pause()
            return
        learners, link, began_s = self._learners, self._link, self._learners.clock.time_s
        request_s = link.latency_s + link.seconds(self._bytes_sent(what, arguments))
        if what is Do.PUSH:
            learners.timeline.add(self._worker, "send", began_s, began_s + request_s)
        self._later(request_s, lambda: self._arrive(what, arguments))

    def _arrive(self, what: Do, arguments: tuple[Any, ...]) -> None:
        """Let the syncer answer, and the reply travel back."""
        exchange, num_bytes = self._exchange, 0
        assert exchange is not None
        go_on: Callable[[], tuple[Do, Any]]
        try:
            reply = self._answer(what, arguments)
            num_bytes = reply.params.nbytes if what is Do.FETCH else 0

            def go_on() -> tuple[Do, Any]:
                return exchange.send(reply)
        except Refused as error:
            refusal = error

            def go_on() -> tuple[Do, Any]:
                return exchange.throw(refusal)

        self._learners.wait_for_syncer()
        reply_s = self._link.latency_s + self._link.seconds(num_bytes)
        self._later(reply_s, lambda: self._go_on(go_on))

    def _bytes_sent(self, what: Do, arguments: tuple[Any, ...]) -> int:
        if what is Do.PUSH:
            delta, codec = arguments[1], self._engine.settings.codec
            return codec.num_bytes(len(delta)) if codec is not None else int(delta.nbytes)
        return sum(one.nbytes for one in arguments[0]) if what is Do.START else 0

    def _answer(self, what: Do, arguments: tuple[Any, ...]) -> Any:
        syncer, codec = self._learners.syncer, self._engine.settings.codec
        if what is Do.JOIN:
            reply = syncer.join(*arguments)
            return syncer.has_started, reply
        if what is Do.FETCH:
            return syncer.fetch(arguments[0])
        if what is Do.PUSH and codec is not None:
            push, delta = arguments
            arguments = push, codec.decode(codec.encode(delta), torch.empty_like(delta))
        requests: dict[Do, Callable[..., Any]] = {
            Do.START: syncer.start,
            Do.POLL: syncer.poll,
            Do.PUSH: syncer.push,
            Do.LEAVE: syncer.leave,
        }
        return requests[what](*arguments)

    def _pause(self) -> None:
        learner = self._learner
        learner.raise_error()
        if learner.is_ready.is_set() and not self._was_ready:
            self._was_ready = True
            self._learners.wakeups.append((self._learners.clock.time_s, self._worker))
        self._pauses += 1
        self._end_pause(SHORTEST_PAUSE_S if self._is_woken else POLL_S + SHORTEST_PAUSE_S)

    def _end_pause(self, after_s: float) -> None:
        number = self._pauses

        def end_pause() -> None:
            if number == self._pauses and self._exchange is None:
                self._begin_exchange()

        self._exchange = None
        self._later(after_s, end_pause)

    def _wake(self) -> None:
        """Exchange soon: something is to be sent, or a local step was made."""
        if not self._is_woken and self._exchange is None:
            self._pauses += 1  # the pause that has begun is not waited for
            self._end_pause(SHORTEST_PAUSE_S)
        self._is_woken = True
