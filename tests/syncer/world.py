"""Learners and a syncer on a virtual clock: real decisions and merges, a model of the network."""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import DecoupledDiLoCo, TensorRange
from lightning_loco.algorithms import Push as Said
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import (
    Merge,
    MergeRounds,
    MergeSettings,
    Push,
    Refused,
    Reply,
)

SIZE = 3
WHOLE = [TensorRange(0, SIZE)]


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
        merge_s: float = 0.0,
        save_every: int = 1,
    ) -> None:
        self.settings, self.method, self.network = settings, method, network
        self.merge_s, self.save_every = merge_s, save_every
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
        start = torch.arange(SIZE * settings.fragments, dtype=torch.float64)
        self.disk: Any = (None, [method.init(one.clone()) for one in start.view(-1, SIZE)])
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
        self.syncer = SyncerProcess(self, *copy.deepcopy(self.disk))

    def kill_syncer(self) -> None:
        assert self.syncer is not None
        self.syncer.is_alive = False
        self.syncer = None

    def start_learner(self, name: str, step_s: float, toward: float = 0.0) -> LearnerProcess:
        generation = self.learners[name].rounds.generation + 1 if name in self.learners else 1
        self.learners[name] = LearnerProcess(self, name, generation, step_s, toward)
        return self.learners[name]


class SyncerProcess:
    """A process with the syncer, which is killed by ``is_alive = False``."""

    def __init__(self, world: World, state: Any, fragments: list[Any]) -> None:
        self.world, self.fragments = world, fragments
        self.rounds = MergeRounds(world.settings, state)
        self.published = [one["outer"].clone() for one in fragments]
        self.deltas: dict[Push, Tensor] = {}
        self.is_alive, self.timer_at = True, math.inf
        self._save()
        for version, params in zip(self.rounds.versions(), self.published, strict=True):
            self._note(version, params)

    def _save(self, merged: int | None = None) -> None:
        copies = [{key: value.clone() for key, value in one.items()} for one in self.fragments]
        self.world.disk = (self.rounds.state_dict(merged), copies)

    def _note(self, version: Any, params: Tensor) -> None:
        """No version has two contents."""
        if version.round:
            known = self.world.contents.setdefault(version, params.clone())
            assert torch.equal(known, params), version

    def ask(self, request: Callable[[MergeRounds], Any]) -> Any:
        found = request(self.rounds)
        self._advance()
        return found

    def fetch(self, fragment: int) -> Any:
        version = self.rounds.version(fragment)
        return self.rounds.epoch, version, fragment, self.published[fragment].clone()

    def push(self, push: Push, delta: Tensor) -> None:
        self.rounds.push(push, self.world.now)
        self.deltas[push] = delta
        self._advance()

    def _advance(self) -> None:
        if not self.is_alive:
            return
        merge = self.rounds.advance(self.world.now)
        if merge is not None:
            self.world.at(self.world.merge_s, lambda: self._merge(merge))
        when = self.rounds.next_time()
        if when is not None and self.world.now < when < self.timer_at:
            self.timer_at = when
            self.world.at(when - self.world.now, self._on_timer)

    def _on_timer(self) -> None:
        self.timer_at = math.inf
        self._advance()

    def _merge(self, merge: Merge) -> None:
        if not self.is_alive:
            return
        world, number, fragment = self.world, merge.due.round, merge.due.fragment
        assert number == self.rounds.committed + 1
        assert len(merge.pushes) >= world.settings.min_quorum
        begun = {(push.learner, push.generation, push.base) for push in merge.pushes}
        assert len(begun) == len(merge.pushes)
        deltas = torch.stack([self.deltas[push] for push in merge.pushes])
        said = [
            Said(push.steps, push.tokens, age)
            for push, age in zip(merge.pushes, merge.ages, strict=True)
        ]
        params = world.method.merge(deltas, said, self.fragments[fragment], WHOLE)
        if number % world.save_every == 0:
            self._save(number)
        if world.random.random() < 0.5:  # a kill may come between saving and publishing
            self._publish(merge, params.clone())
        else:
            world.at(1e-9, lambda: self._publish(merge, params.clone()))

    def _publish(self, merge: Merge, params: Tensor) -> None:
        if not self.is_alive:
            return
        self.rounds.commit(merge.due.round, self.world.now)
        self.published[merge.due.fragment] = params
        self._note(self.rounds.version(merge.due.fragment), params)
        self.world.merges.append(merge)
        self._advance()
        waiting = self.rounds.waiting_pushes()
        self.deltas = {push: delta for push, delta in self.deltas.items() if push in waiting}
        assert len(waiting) == len(self.deltas)


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
        self._send(
            lambda syncer: syncer.ask(lambda one: one.poll(*asked, self.world.now)), self._on_reply
        )

    def _join(self) -> None:
        rounds = self.rounds
        said = (rounds.name, rounds.generation, rounds.total_steps)
        self._send(
            lambda syncer: syncer.ask(lambda one: one.join(*said, self.world.now)), self._on_reply
        )

    def _on_reply(self, reply: Reply) -> None:
        for fragment in self.rounds.listen(reply):
            self._send(lambda syncer, f=fragment: syncer.fetch(f), self._on_fetch)

    def _on_fetch(self, reply: Any) -> None:
        epoch, version, fragment, params = reply
        if self.rounds.is_news(epoch, fragment, version):
            self.arrived[fragment] = (epoch, version, params)

    def _send(
        self, act: Callable[[Any], Any], on_reply: Callable[[Any], None] | None = None
    ) -> None:
        def arrive() -> None:
            syncer = self.world.syncer
            if syncer is None:
                return
            try:
                reply = act(syncer)
            except Refused as error:
                self.world.refused[error.reason] += 1
                if error.reason in ("epoch", "learner"):
                    self.world.send(self._join_if_alive)
                return
            if on_reply is not None:
                self.world.send(lambda: on_reply(reply) if self.is_alive else None)

        self.world.send(arrive)

    def _join_if_alive(self) -> None:
        if self.is_alive:
            self._join()
