"""Learners and a syncer on a virtual clock: real decisions and merges, a model of the network."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.clock import Clock
from lightning_loco.algorithms import DecoupledDiLoCo, TensorRange
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import Merge, MergeSettings, Push, Refused, Reply
from lightning_loco.syncer.syncer import Syncer
from tests.harness.model_disk import ModelDisk

SIZE = 3
WHOLE = [TensorRange(0, SIZE)]


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
            self.syncer.is_alive, self.syncer = False, None
        self.disk.before = bool
        if machine:
            self.disk = self.random.choice([*self.disk.crashes()])

    def start_learner(self, name: str, step_s: float, toward: float = 0.0) -> LearnerProcess:
        generation = self.learners[name].rounds.generation + 1 if name in self.learners else 1
        self.learners[name] = LearnerProcess(self, name, generation, step_s, toward)
        return self.learners[name]


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
            on_merge=world.merges.append,
            clock=WorldClock(world),
            disk=world.disk,
        )
        self.syncer.start([*world.start])
        self._look()

    def _before(self, operation: str) -> None:
        assert self.is_alive, "a process writes after its end"
        if self.world.disk_is_full and operation.startswith("create"):
            raise OSError(28, "No space left on device")
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def ask(self, request: Callable[[Syncer], Any]) -> Any:
        """Answer a request, unless that is the end of the process."""
        try:
            try:
                reply = request(self.syncer)
            except Refused:
                self._look()
                raise
            self._look()
            return reply
        except Killed:
            self.world.kill_syncer()
            return None

    def _look(self) -> None:
        """Check what is published, and set the timer."""
        syncer, world = self.syncer, self.world
        for fragment in range(world.settings.fragments):
            _, version, params = syncer.fetch(fragment)
            known = world.contents.setdefault((fragment, version), params.clone())
            assert torch.equal(known, params), "no version has two contents"
        assert syncer._deltas.keys() == syncer.rounds.waiting_pushes()
        wait_s = syncer.advance()
        if wait_s is not None and world.now < world.now + wait_s < self.timer_at:
            self.timer_at = world.now + wait_s
            world.at(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self.timer_at = math.inf
        if self.is_alive:
            self.ask(Syncer.advance)


class LearnerProcess:
    """A process with a learner. Its local steps go a tenth of the way to ``toward``."""

    def __init__(
        self, world: World, name: str, generation: int, step_s: float, toward: float
    ) -> None:
        self.world, self.step_s, self.toward = world, step_s, toward
        self.rounds = LearnerRounds(name, generation, world.settings.fragments)
        zeros = torch.zeros(world.settings.fragments, SIZE, dtype=torch.float64)
        self.local, self.received = zeros, zeros.clone()
        self.arrived: dict[int, tuple[int, Any, Tensor]] = {}
        self.is_alive, self.is_training = True, True
        self.replaced = 0
        self.boundary()

    def boundary(self) -> None:
        """What happens between two local steps, and the next one."""
        if not self.is_alive:
            return
        rounds = self.rounds
        for fragment, (epoch, version, params) in sorted(self.arrived.items()):
            if not rounds.is_news(epoch, fragment, version):
                continue
            if (leftover := rounds.leftover(fragment, version)) is not None:
                self._send_push(leftover)
            if rounds.received[fragment] is not None:  # else there is nothing to mix it with
                own = self.local[fragment].clone()
                self.local[fragment] = self.world.method.continue_from(params, own)
            else:
                self.local[fragment] = params
            self.received[fragment] = params
            self.replaced += rounds.receive(fragment, version)
        self.arrived.clear()
        if self.is_training:
            for push in rounds.answers():
                self._send_push(push)
        self._poll()
        self.world.at(self.step_s / 2, self._poll)
        self.world.at(self.step_s, self._step)

    def _send_push(self, push: Push) -> None:
        fragment = push.due.fragment
        delta = self.world.method.propose(self.local[fragment], self.received[fragment])
        self._send(lambda syncer: syncer.push(push, delta.clone()))

    def _step(self) -> None:
        if self.is_alive and self.is_training and None not in self.rounds.received:
            self.local += 0.1 * (self.toward - self.local)
            self.rounds.count(tokens=8.0)
            self.world.made[self.rounds.name] += 1
        self.boundary()

    def _poll(self) -> None:
        if not self.is_alive:
            return
        rounds = self.rounds
        if rounds.epoch == 0:
            self._join()
            return
        asked = (rounds.name, rounds.generation, rounds.epoch, rounds.total_steps)
        self._send(lambda syncer: syncer.poll(*asked), self._on_reply)

    def _join(self) -> None:
        rounds = self.rounds
        said = (rounds.name, rounds.generation, rounds.total_steps)
        contract = self.world.contract.as_plain()
        self._send(lambda syncer: syncer.join(*said, contract), self._on_reply)

    def _on_reply(self, reply: Reply) -> None:
        for fragment in self.rounds.listen(reply):
            self._send(lambda syncer, f=fragment: (f, syncer.fetch(f)), self._on_fetch)

    def _on_fetch(self, reply: Any) -> None:
        fragment, (epoch, version, params) = reply
        if self.rounds.is_news(epoch, fragment, version):
            self.arrived[fragment] = (epoch, version, params)

    def _send(
        self, act: Callable[[Any], Any], on_reply: Callable[[Any], None] | None = None
    ) -> None:
        def arrive() -> None:
            process = self.world.syncer
            if process is None:
                return
            try:
                reply = process.ask(act)
            except Refused as error:
                self.world.refused[error.reason] += 1
                if error.reason in ("epoch", "learner"):
                    self.world.send(self._join_if_alive)
                return
            if on_reply is not None and process.is_alive:
                self.world.send(lambda: on_reply(reply) if self.is_alive else None)

        self.world.send(arrive)

    def _join_if_alive(self) -> None:
        if self.is_alive:
            self._join()
