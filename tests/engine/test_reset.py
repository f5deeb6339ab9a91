"""Rounds after a reset equal the first rounds of a new engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import Engine
from tests.cases import CASES, Case
from tests.harness.pool import Pool, run_each
from tests.harness.small_model import flat, make_model, train_step, worker_batch


def train(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor]:
    """Run rounds from a second model, with a used engine and with a new one."""
    found = []
    for has_past in (True, False):
        model = make_model(seed=1)
        settings = case.strategy(sync_every=2).settings
        engine = Engine.from_settings(model, settings, WorkerGroup.create(timeout_s=20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4 if has_past else 0):
            train_step(model, optimizer, worker_batch(rank, 100 + step))
            engine.step()
        if has_past:
            engine.sync_point("the second model")
            model.load_state_dict(make_model(seed=1).state_dict())
            engine.reset()
        for step in range(6):
            train_step(model, optimizer, worker_batch(rank, step))
            engine.step()
        engine.finish()
        engine.close()
        found.append(flat(model))
    return found[0], found[1]


def test_nothing_of_the_past_is_left(pool: Pool, subtests: pytest.Subtests) -> None:
    names = ("local_sgd", "diloco", "diloco_adam", "diloco_adagrad", "gasloc", "gasloc_plain")
    rows = {name: (CASES[name],) for name in names}
    for name, results in run_each(pool, train, rows, world=2).items():
        with subtests.test(name):
            for past, new in results:
                assert torch.equal(past, new)


@pytest.mark.parametrize("overlapping", ["async_diloco_cold", "gasloc_overlap_cold"])
def test_a_pending_round_is_dropped(pool: Pool, overlapping: str) -> None:
    for weights, _ in pool.run(train, CASES[overlapping], world=2):
        assert torch.isfinite(weights).all()
