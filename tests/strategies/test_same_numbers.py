"""Every algorithm gives the same numbers in simulation, on raw groups and in Trainer.fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.algorithms.toys import assert_close, run_engine, simulate
from tests.cases import Case, rows
from tests.pool import Pool, make_trainer
from tests.tiny import TinyModule, flat, make_loader

SYNC_EVERY = 3
ROUNDS = 4


def run_trainer(rank: int, world: int, case: Case) -> Tensor:
    steps = ROUNDS * SYNC_EVERY
    strategy = case.strategy(SYNC_EVERY)
    trainer = make_trainer(strategy, max_steps=steps, use_distributed_sampler=False)
    module = TinyModule(lr=0.05)
    trainer.fit(module, make_loader(rank, steps))
    return flat(module)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@rows("same numbers")
def test_same_numbers(pool: Pool, case: Case, world: int) -> None:
    settings = case.settings(sync_every=SYNC_EVERY)
    expected = simulate(case.algorithm, world, ROUNDS, **settings)
    settings["bucket_bytes"] = 4096
    histories = pool.run(run_engine, case.algorithm, ROUNDS, settings, world=world)
    assert_close(torch.stack(histories, dim=1), expected)
    for result in pool.run(run_trainer, case, world=world):
        assert_close(result, expected[-1, 0])
