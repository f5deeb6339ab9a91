"""Every algorithm gives the same result in simulation, with process groups and in Trainer.fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.strategies import METHODS
from tests.cases import CASES, LEFT_OUT, Case
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.harness.toys import assert_close, run_engine, simulate

SYNC_EVERY = 2
ROUNDS = 4


def run_trainer(rank: int, world: int, case: Case) -> Tensor:
    steps = ROUNDS * SYNC_EVERY
    strategy = case.strategy(SYNC_EVERY)
    trainer = make_trainer(strategy, max_steps=steps, use_distributed_sampler=False)
    module = TinyModule(lr=0.05)
    trainer.fit(module, make_loader(rank, steps))
    return flat(module)


def run_both(rank: int, world: int, case: Case, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the engine's parameters after each round, and the Trainer's at the end."""
    return run_engine(rank, world, case.algorithm, ROUNDS, settings), run_trainer(rank, world, case)


def params(names: Iterable[str], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(CASES[name], id=name, marks=marks) for name in names]


ALL = [name for name, case in CASES.items() if case.not_in.get("same numbers") not in LEFT_OUT]
MAIN = [name for name in ALL if CASES[name].variant_of is None]
MEANS = [name for name in MAIN if CASES[name].graph is None]
GOSSIP = [name for name in MAIN if CASES[name].graph is not None]
ALONE = ["local_sgd", "diloco", "async_diloco", "gasloc"]
"""One of each kind, for one worker."""


@pytest.mark.parametrize(
    ("case", "world"),
    [
        *cover(params([n for n in MEANS if n in METHODS]), [2, 3], strength=1),
        *cover(
            params([n for n in MEANS if n not in METHODS], pytest.mark.soak), [2, 3], strength=1
        ),
        *cover(params(MEANS, pytest.mark.soak), [4]),
        *cover(params(GOSSIP), [4]),
        *cover(params(ALONE), [1]),
        *cover(params([n for n in MAIN if n not in ALONE], pytest.mark.soak), [1]),
        *cover(params(GOSSIP, pytest.mark.soak), [2, 3], strength=1),
        *cover(
            params([n for n in ALL if n not in MAIN], pytest.mark.soak), [4, 3, 2, 1], strength=1
        ),
    ],
)
def test_same_numbers(pool: Pool, case: Case, world: int) -> None:
    settings = case.settings(sync_every=SYNC_EVERY)
    expected = simulate(case.algorithm, world, ROUNDS, **settings)
    settings["bucket_bytes"] = 4096
    results = pool.run(run_both, case, settings, world=world)
    assert_close(torch.stack([history for history, _ in results], dim=1), expected)
    ended = simulate(
        case.algorithm, world, ROUNDS, last_round=False, **case.settings(sync_every=SYNC_EVERY)
    )
    for _, final in results:
        assert_close(final, ended[-1, 0])
