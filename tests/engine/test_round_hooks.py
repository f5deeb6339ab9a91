"""The hooks around a round: when they are called, and a round that replaces another one."""

from __future__ import annotations

import torch

from lightning_loco.algorithms import Algorithm, LocalSGD
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_status import KnownStatuses
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.engine.engine import RoundHooks
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.exchange import Exchange
from lightning_loco.engine.fragment_sync import FragmentSync, Round, Stage
from lightning_loco.schedules import Staggered
from lightning_loco.topology import Topology
from tests.harness.toys import Layers


class OneWorker:
    """A membership whose only member runs its rounds with some hooks."""

    min_workers = 1

    def __init__(self, hooks: RoundHooks) -> None:
        self._hooks = hooks

    def prepare(self, algorithm: Algorithm, topology: Topology | None, is_late: bool) -> Algorithm:
        return algorithm.prepare(1, topology, is_late=is_late)

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> tuple[Exchange, RoundHooks]:
        return make_exchange(settings.algorithm, group, Statistics(), None), self._hooks


class Calls(RoundHooks):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, engine: Engine) -> None:
        self.calls.append("start")

    def when_due(self, engine: Engine) -> bool:
        self.calls.append("due")
        return False

    def before_round(self, engine: Engine, fragment: FragmentSync) -> None:
        self.calls.append(f"before fragment {engine.fragments.index(fragment)}")

    def received(self, engine: Engine, received: Round) -> Round:
        self.calls.append(f"received {received.index}")
        return received

    def recorded(self, engine: Engine) -> None:
        self.calls.append("recorded")

    def finish(self, engine: Engine) -> None:
        self.calls.append("finish")

    def close(self) -> None:
        self.calls.append("close")


class Ahead(RoundHooks):
    """Replaces the first round that is received by round 5, of the other fragment."""

    def received(self, engine: Engine, received: Round) -> Round:
        mine, other = engine.fragments
        assert mine.pending is received
        mine.drop_pending()
        other.pending = Round(
            other,
            index=5,
            began_at=0,
            weight=0.0,
            statuses=KnownStatuses(received.statuses.wait()),
            received=[torch.full_like(bucket.message, 7.0) for bucket in other.memory.buckets],
            stage=Stage.COMBINED,
        )
        return other.pending


def engine_with(hooks: RoundHooks) -> Engine:
    settings = RoundSettings(LocalSGD(), Staggered(4, 2, 0), membership=OneWorker(hooks))
    return Engine.from_settings(Layers((2, 3)), settings, WorkerGroup(0, 1))


def test_hooks_are_called_in_this_order() -> None:
    engine = engine_with(hooks := Calls())
    engine.start()
    ran = [engine.step() for _ in range(4)]
    engine.finish()
    engine.close()
    rounds = [
        call
        for index in range(2)
        for call in ("due", f"before fragment {index}", f"received {index}", "recorded")
    ]
    assert ran == [False, True, False, True]
    assert hooks.calls == ["start", *rounds, "finish", "close"]


def test_the_round_that_a_hook_returns_is_applied_in_place_of_the_own_one() -> None:
    engine = engine_with(Ahead())
    before = [p.detach().clone() for p in engine.worker.replica.model.parameters()]
    assert not engine.step()
    assert engine.step()
    after = list(engine.worker.replica.model.parameters())
    assert torch.equal(after[0], before[0]), "the own round is not applied"
    assert (after[1] == 7.0).all()
    assert [fragment.pending for fragment in engine.fragments] == [None, None]
    assert engine.worker.round_index == 6
    engine.close()
