"""``link=...`` in the Trainer: strategies with rounds or fetches accept it."""

from __future__ import annotations

import time

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_loco import Link, PairwiseEngine
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.distributed.statistics import Spans
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.engine_strategy import EngineStrategy
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader

WITH_WORKERS = [
    name
    for name, kind in METHODS.items()
    # Learners exchange in the background: tests/syncer/test_service.py.
    if issubclass(kind, EngineStrategy) and METHOD_TABLE[name].exchange != "syncer"
]
LINK = Link(1000, 0.01)
STEPS = 13
OPTIONS = {"sync_every": 6, "fragments": 2, "fetch_probability": 1.0}


class Watch(Callback):
    """Makes steps long enough for a fetch, and records what the link delays."""

    seconds = 0.0
    is_delayed = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.strategy.statistics.spans = Spans()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        time.sleep(0.02)
        strategy = trainer.strategy
        self.seconds = strategy.statistics.spans.seconds.get("send", 0.0)
        if isinstance(strategy.engine, PairwiseEngine):
            decisions = strategy.engine.node._fetching._fetcher.decisions
            self.is_delayed = decisions._duration is not None


def fit(rank: int, world: int, name: str, link: Link | None) -> bool:
    """Return whether the link has delayed rounds or fetches."""
    kind = METHODS[name]
    shown = argument_names(kind)
    options = {name: count for name, count in OPTIONS.items() if name in shown}
    strategy, watch = kind(link=link, **options), Watch()
    settings = {"max_steps": STEPS, "use_distributed_sampler": False}
    make_trainer(strategy, callbacks=[watch], **settings).fit(
        TinyModule(), make_loader(rank, STEPS)
    )
    return watch.is_delayed or watch.seconds >= 0.01


def test_every_strategy_of_workers_accepts_a_link(pool: Pool, subtests: pytest.Subtests) -> None:
    for name in WITH_WORKERS:
        with subtests.test(name):
            assert pool.run(fit, name, LINK, world=2) == [True, True]


def test_without_a_link_nothing_is_delayed(pool: Pool) -> None:
    assert pool.run(fit, "diloco", None, world=2) == [False, False]
    assert pool.run(fit, "pairwise_gossip", None, world=2) == [False, False]
