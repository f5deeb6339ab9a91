"""Learners and a syncer on a virtual clock: only network, disk and local steps are models."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.clock import Clock
from lightning_loco._util.decisions import Decision
from lightning_loco.algorithms import DecoupledDiLoCo, TensorRange
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.learner import POLL_S, SHORTEST_PAUSE_S, Do, Learner
from lightning_loco.syncer.merge_rounds import Merge, MergeSettings, Push, Refused
from lightning_loco.syncer.syncer import Syncer
from tests.harness.model_disk import ModelDisk

SIZE = 3
WHOLE = [TensorRange(0, SIZE)]

TIMEOUT_S = 3.0
"""How long a learner waits for a reply. On a slow network the request may still arrive later."""


def contract_of(
    method: DecoupledDiLoCo, settings: MergeSettings, dtype: torch.dtype = torch.float64
) -> Contract:
    """Of a model whose fragments have one small tensor each."""
    return Contract(method, settings, [WHOLE] * settings.fragments, {}, dtype)


@dataclasses.dataclass(frozen=True)
class Network:
    """How long messages take, and how often one is lost or comes twice."""

    least_s: float = 0.0
    most_s: float = 0.0
    lost: float = 0.0
    twice: float = 0.0


class World:
    """A run on a virtual clock, decided by a seed."""

    def __init__(
        self,
        settings: MergeSettings,
        method: DecoupledDiLoCo,
        seed: int = 0,
        network: Network = Network(),
        save_every: int = 1,
    ) -> None:
        self.settings, self.method, self.network = settings, method, network
        self.save_every = save_every
        self.contract = contract_of(method, settings)
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.learners: dict[str, LearnerProcess] = {}
        self.merges: list[Merge] = []
        self.unpublished: Merge | None = None
        self.refused: dict[str, int] = defaultdict(int)
        self.made: dict[str, int] = defaultdict(int)
        self.contents: dict[Any, Tensor] = {}
        self.syncer: SyncerProcess | None = None
        self.start = torch.arange(SIZE * settings.fragments, dtype=torch.float64).view(-1, SIZE)
        self.disk, self.disk_is_full = ModelDisk(), False
        self.start_syncer()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until

    def send(self, act: Callable[[], None]) -> None:
        """Deliver a message, or lose it, or deliver it twice."""
        network, draw = self.network, self.random.random
        if draw() < network.lost:
            return
        for _ in range(2 if draw() < network.twice else 1):
            self.at(network.least_s + draw() * (network.most_s - network.least_s), act)

    def start_syncer(self) -> None:
        self.syncer = SyncerProcess(self)

    def kill_syncer(self, machine: bool = False) -> None:
        """End the process of the syncer; its machine may lose what was not synced."""
        if self.syncer is not None:
            self.unpublished = self.syncer.syncer._merging
            self.syncer.is_alive, self.syncer = False, None
        self.disk.before = bool
        if machine:
            self.disk = self.random.choice([*self.disk.crashes()])

    def start_learner(
        self, name: str, step_s: float, toward: float = 0.0, saved: SavedLearner | None = None
    ) -> None:
        """Start a process, which continues from what an earlier one of this learner has saved."""
        before = self.learners.get(name)
        generation = 1 if before is None else before.learner.rounds.generation + 1
        process = LearnerProcess(self, name, generation, step_s, toward, saved)
        self.learners[name] = process


class Killed(BaseException):
    """The process of the syncer ends here."""


class WorldClock(Clock):
    """The clock of a world."""

    def __init__(self, world: World) -> None:
        self.now = lambda: world.now  # type: ignore[misc]


class SyncerProcess:
    """A process with a syncer, which may be killed before any operation on its disk."""

    def __init__(self, world: World) -> None:
        self.world, self.timer_at, self.is_alive = world, math.inf, True
        self.left: int | None = None
        world.disk.before = self._before
        self.syncer = Syncer(
            world.contract,
            Path("/run"),
            save_every=world.save_every,
            on_merge=self._note_merge,
            clock=WorldClock(world),
            disk=world.disk,
        )
        committed = self.syncer.rounds.committed
        if committed > len(world.merges) and world.unpublished is not None:
            world.merges.append(world.unpublished)  # the process has ended when it was saved
        del world.merges[committed:]  # what was merged after the last save is lost
        self._look()

    def _note_merge(self, merge: Merge) -> None:
        self.world.merges.append(merge)
        assert merge.due.round == len(self.world.merges), "rounds follow each other"
        in_time = [push for push in merge.pushes if push.due == merge.due]
        assert len(in_time) >= self.world.settings.min_quorum

    def _before(self, operation: str) -> None:
        assert self.is_alive, "a process writes after its end"
        if self.world.disk_is_full and operation.startswith("create"):
            raise OSError(28, "No space left on device")
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def ask(self, what: Do, arguments: tuple[Any, ...], reply: Callable[[Any], None]) -> None:
        """Answer a request, unless that is the end of the process."""
        try:
            try:
                outcome = getattr(self.syncer, what.value)(*arguments)
            except Refused as error:
                outcome = error
                self.world.refused[error.reason] += 1
            self._look()
        except Killed:
            self.world.kill_syncer()
        except OSError:  # of a START that cannot be saved: the connection breaks
            assert what is Do.START
        else:
            reply((self.syncer.has_started, outcome) if what is Do.JOIN else outcome)

    def _look(self) -> None:
        """Check what is published, and set the timer."""
        syncer, world = self.syncer, self.world
        for fragment in range(world.settings.fragments if syncer.has_started else 0):
            _, version, params = syncer.fetch(fragment)
            if (known := world.contents.get((fragment, version))) is None:
                known = world.contents[fragment, version] = params.clone()
            assert torch.equal(known, params), "no version has two contents"
        assert syncer._deltas.keys() == syncer.rounds.waiting_pushes()
        wait_s = syncer.advance()
        if wait_s is not None and world.now < world.now + wait_s < self.timer_at:
            self.timer_at = world.now + wait_s
            world.at(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self.timer_at = math.inf
        if self.is_alive:
            try:
                self._look()
            except Killed:
                self.world.kill_syncer()


class SavedLearner(NamedTuple):
    """What a process of a learner leaves to a later one."""

    local: Tensor
    state: dict[str, Any]


class LearnerProcess:
    """A process with a learner. Its local steps go a tenth of the way to ``toward``."""

    def __init__(
        self,
        world: World,
        name: str,
        generation: int,
        step_s: float,
        toward: float,
        saved: SavedLearner | None,
    ) -> None:
        self.world, self.step_s, self.toward = world, step_s, toward
        self.local = (world.start if saved is None else saved.local).clone()
        received = world.start if saved is None else saved.state["received"].view(-1, SIZE)
        self.learner = Learner(
            world.contract, name, generation, [*received.clone()], "syncer", WorldClock(world)
        )
        if saved is not None:
            self.learner.rounds.load_state_dict(saved.state["rounds"])
        self.is_alive = self.is_training = True
        self.is_leaving = False
        self.frozen_until = 0.0
        self._epochs = [0] * world.settings.fragments
        # Progress, by its fragment and base: what is not in the model any more, and what was pushed
        # and taken, or refused for good.
        self._replaced: set[tuple[int, Any]] = set()
        self._heard: set[tuple[int, Any]] = set()
        self._waiting_for: object = None
        self._exchange()
        self._later(step_s, self._step)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.at(delay_s, self._if_awake(act))

    def _if_awake(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return what does something now, or when the process is not frozen any more."""

        def act_if_awake() -> None:
            frozen_s = self.frozen_until - self.world.now
            if self.is_alive and frozen_s > 0:
                self.world.at(frozen_s, act_if_awake)
            elif self.is_alive:
                act()

        return act_if_awake

    def save(self) -> SavedLearner:
        """Save the learner, as between two local steps."""
        return SavedLearner(self.local.clone(), self.learner.state_dict())

    def _step(self) -> None:
        """Make a local step, if there are parameters, and do what is to be done after it."""
        learner = self.learner
        if self.is_leaving:
            self._leave()
        elif learner.is_ready.is_set():
            if self.is_training and None not in learner.rounds.received:
                self.local += 0.1 * (self.toward - self.local)
                learner.count_step(tokens=8.0)
                self.world.made[learner.rounds.name] += 1
            self._reach_boundary()
        self._later(self.step_s, self._step)

    def _leave(self) -> None:
        if self.learner.has_left.is_set():
            rounds = self.learner.rounds
            self._replaced |= {one for one in enumerate(rounds.received) if rounds.steps[one[0]]}
            self.check_heard()
            self.is_alive = False
        else:
            self.learner.prepare_to_leave(self._read)

    def _reach_boundary(self) -> None:
        rounds = self.learner.rounds
        before, steps = [*rounds.received], [*rounds.steps]
        for fragment, params in self.learner.at_boundary(self._read).written.items():
            self.local[fragment] = params
            old, new = before[fragment], rounds.received[fragment]
            if steps[fragment]:
                self._replaced.add((fragment, old))
            assert old != new, "progress is not replaced by what it began from"
            is_back = old is not None and new is not None and new.round < old.round
            assert not is_back or self._epochs[fragment] < rounds.epoch, "back without a restart"
            self._epochs[fragment] = rounds.epoch
        self._check_received()

    def _read(self, fragment: int) -> Tensor:
        return self.local[fragment].clone()

    def _check_received(self) -> None:
        learner = self.learner
        for fragment, version in enumerate(learner.rounds.received):
            if version is not None:
                own = learner.received[fragment]
                assert torch.equal(own, self.world.contents[fragment, version]), (fragment, version)

    def check_heard(self) -> None:
        """Check that no progress was dropped before the syncer has answered a push of it."""
        assert self._replaced <= self._heard, self._replaced - self._heard

    def _check_push(self, push: Push, delta: Tensor) -> None:
        """Check that a pseudo-gradient is that of its base and its steps."""
        base = self.world.contents[push.due.fragment, push.base]
        if self.world.method.mix == 0:  # otherwise steps begin elsewhere
            expected = (1 - 0.9**push.steps) * (base - self.toward)
            torch.testing.assert_close(delta, expected, rtol=1e-9, atol=1e-9)

    def _exchange(self) -> None:
        self._go_on(self.learner.exchange(), None)

    def _go_on(self, exchange: Decision[Do, None], outcome: Any) -> None:
        """Send the next request of an exchange, or begin another one after its end."""
        throws = isinstance(outcome, Exception)
        try:
            request = exchange.throw(outcome) if throws else exchange.send(outcome)
        except (StopIteration, OSError) as end:
            if isinstance(end, OSError):
                self.learner.note_loss(end)
            pause_s = self.world.random.uniform(SHORTEST_PAUSE_S, POLL_S)
            self._later(pause_s, self._exchange)
        else:
            self._ask(exchange, *request)

    def _ask(self, exchange: Decision[Do, None], what: Do, arguments: tuple[Any, ...]) -> None:
        world = self.world
        mark = self._waiting_for = object()
        if what is Do.PUSH:
            self._check_push(*arguments)
        elif what is Do.FETCH:
            arguments = arguments[:1]  # without the vector for the reply
        elif what is Do.START:
            arguments = ([*arguments[0]],)  # as they are now

        def go_on(outcome: Any) -> None:
            if self._waiting_for is mark:  # else there was a reply, or none in time
                self._waiting_for = None
                is_lost = isinstance(outcome, OSError) or (
                    isinstance(outcome, Refused) and outcome.reason in ("epoch", "learner")
                )
                if what is Do.PUSH and not is_lost:
                    self._heard.add((arguments[0].due.fragment, arguments[0].base))
                self._go_on(exchange, outcome)

        def reply(outcome: Any) -> None:
            world.send(self._if_awake(lambda: go_on(outcome)))

        def arrive() -> None:
            if world.syncer is not None:
                world.syncer.ask(what, arguments, reply)

        world.send(arrive)
        self._later(TIMEOUT_S, lambda: go_on(TimeoutError("no reply")))
