"""Advice before training on settings that give poor results."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    LocalSGDStrategy,
)
from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.small_model import ValidatedModule, make_loader

few_rounds = partial(LocalSGDStrategy, sync_every=4)
long_rounds = partial(LocalSGDStrategy, sync_every=6)
long_rounds_of_fragments = partial(AsyncDiLoCoStrategy, sync_every=6, fragments=2)
much_momentum = partial(DiLoCoStrategy, sync_every=2, outer_momentum=0.9)
little_momentum = partial(DiLoCoStrategy, sync_every=2, outer_momentum=0.5)
a_round_late = partial(EagerDiLoCoStrategy, sync_every=2)
a_part_of_a_round_late = partial(AsyncDiLoCoStrategy, sync_every=2)
compressed = partial(LocalSGDStrategy, sync_every=4, compression="int8")
compressed_and_outer = partial(
    DiLoCoStrategy, sync_every=4, outer_momentum=0.5, compression="int8", evaluate="outer"
)


def patient() -> EarlyStopping:
    return EarlyStopping("val_loss", patience=99)


ROWS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "nothing": (little_momentum, {"max_epochs": 6}, []),
    "few rounds": (
        few_rounds,
        {"max_epochs": 3},
        [
            "sync_every=4 leaves 2 rounds in this run of 12 local steps.* "
            r"Use at least 40 local steps, or sync_every=1\.$"
        ],
    ),
    "one round": (
        long_rounds,
        {"max_steps": 9},
        ["sync_every=6 leaves 1 round in this .* Use at least 60 local steps.$"],
    ),
    "few rounds of some fragments": (
        long_rounds_of_fragments,
        {"max_steps": 10},
        ["sync_every=6 leaves 1 or 2 rounds of each fragment in this .* Use at least 60"],
    ),
    "one round of all fragments": (
        long_rounds_of_fragments,
        {"max_steps": 9},
        ["sync_every=6 leaves 1 round of each fragment in this .* Use at least 60"],
    ),
    "rounds that can be more": (
        long_rounds,
        {"max_steps": 59, "limit_val_batches": 0},
        ["sync_every=6 leaves 9 rounds .* Use at least 60 local steps, or sync_every=5 or less"],
    ),
    "long rounds": (
        long_rounds,
        {"max_epochs": 16, "limit_val_batches": 0},
        ["sync_every=6 is longer than an epoch of 4 local steps.* Use sync_every=4 or less"],
    ),
    "accumulated": (
        few_rounds,
        {"max_epochs": 24, "accumulate_grad_batches": 2, "limit_val_batches": 0},
        ["sync_every=4 is longer than an epoch of 2 local steps"],
    ),
    "momentum": (much_momentum, {"max_epochs": 6}, ["outer_momentum=0.9 suits hundreds.*is 2"]),
    "late": (a_round_late, {"max_epochs": 6}, ["a whole round late.* with sync_every=2.* Use a"]),
    "less late": (a_part_of_a_round_late, {"max_epochs": 6}, []),
    "averages": (
        compressed,
        {"max_epochs": 12},
        [r"takes 7\.\d times the bytes of the compressed .* Validate every (29|30|31) local"],
    ),
    "outer": (compressed_and_outer, {"max_epochs": 12}, []),
    "outer, monitored": (
        compressed_and_outer,
        {"max_epochs": 12, "val_check_interval": 2, "callbacks": [patient()]},
        [r"only rounds change: EarlyStopping\(monitor='val_loss'\) may see .* every 4 local steps"],
    ),
    "outer, monitored at rounds": (
        compressed_and_outer,
        {"max_epochs": 12, "callbacks": [patient()]},
        [],
    ),
    "seldom": (compressed, {"max_epochs": 16, "check_val_every_n_epoch": 8}, []),
    "trial": (few_rounds, {"fast_dev_run": True}, []),
}


def advice_for(rank: int, world: int, name: str) -> list[str]:
    make, settings, _ = ROWS[name]
    with messages_of(RANK_ZERO) as texts:
        trainer = make_trainer(make(), **settings, use_distributed_sampler=False)
        module = ValidatedModule()
        module.lr = 1e-4
        module.model = nn.Sequential(nn.Linear(3, 1000), nn.Tanh(), nn.Linear(1000, 1)).double()
        trainer.fit(module, make_loader(rank, 4), make_loader(rank, 1))
    return [text for text in texts if " Use " in text or " Validate " in text]


def test_each_setting_gets_one_line_of_advice(pool: Pool, subtests: pytest.Subtests) -> None:
    found = run_each(pool, advice_for, {name: [name] for name in ROWS}, world=2)
    for name, (_, _, expected) in ROWS.items():
        with subtests.test(name):
            first, second = found[name]
            assert second == []
            assert len(first) == len(expected), first
            for text, pattern in zip(first, expected, strict=True):
                assert re.search(pattern, text), text
