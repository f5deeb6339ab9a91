"""``link=...`` under the Trainer: strategies with rounds or fetches accept and report it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_loco import CommunicationMonitor, Link
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.base import EngineStrategy
from tests.pool import Pool, make_trainer
from tests.small_model import TinyModule, make_loader
from tests.strategies.messages import RANK_ZERO, messages_of

WITH_WORKERS = [name for name, kind in METHODS.items() if issubclass(kind, EngineStrategy)]
LINK = Link(1000, 0.01)
STEPS = 13
OPTIONS = {"sync_every": 6, "fragments": 2, "fetch_probability": 1.0}
ROW = r"  on the link {9}([\d.]+ m?s): ([\d.]+ m?s) hidden, ([\d.]+ m?s) waited"


class SlowSteps(Callback):
    """Makes steps long enough for a fetch."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        time.sleep(0.02)


def fit(
    rank: int, world: int, name: str, link: Link | None
) -> tuple[list[str], float | None, bool]:
    """Return the messages about the link, the seconds on it, and whether they are logged."""
    kind = METHODS[name]
    shown = argument_names(kind)
    options = {name: count for name, count in OPTIONS.items() if name in shown}
    strategy = kind(link=link, **options)
    monitor = CommunicationMonitor()
    settings = {"max_steps": STEPS, "use_distributed_sampler": False}
    trainer = make_trainer(strategy, callbacks=[SlowSteps()], **settings)
    with messages_of(RANK_ZERO) as texts:
        trainer.fit(TinyModule(), make_loader(rank, STEPS))
    line = [line for text in texts for line in text.splitlines() if "on the link" in line]
    is_logged = "loco/emulated_s" in monitor.metrics(strategy)
    return line, strategy.statistics.emulated_s, is_logged


def test_every_strategy_of_workers_accepts_a_link(pool: Pool, subtests: pytest.Subtests) -> None:
    for name in WITH_WORKERS:
        with subtests.test(name):
            check_link(*pool.run(fit, name, LINK, world=2))


def seconds_in(text: str) -> float:
    number, unit = text.split()
    return float(number) / {"s": 1, "ms": 1000}[unit]


def check_link(first: Any, second: Any) -> None:
    (line,) = first[0]
    found = re.fullmatch(ROW, line)
    assert found
    assert second[0] == []
    under_way_s, hidden_s, waited_s = map(seconds_in, found.groups())
    assert under_way_s == pytest.approx(waited_s + hidden_s, rel=0.01)  # three digits of each
    for _, emulated_s, is_logged in (first, second):
        assert emulated_s is not None
        assert emulated_s >= 0.01
        assert is_logged


def test_without_a_link_there_is_no_message(pool: Pool) -> None:
    assert pool.run(fit, "diloco", None, world=2) == [([], None, False)] * 2
