"""A worker with NaN goes on from the outer parameters in all fragments, whichever has a round."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import DiLoCo, Mix
from lightning_loco.rounds import Engine, RoundSettings
from lightning_loco.schedules import Staggered
from tests.pool import Pool
from tests.rounds.fragments import Layers
from tests.rounds.toys import approach, flat, run_each


def with_nan(rank: int, world: int, delay: int, at: int) -> tuple[Tensor, Tensor]:
    """Worker 1 has NaN in one layer, and its next local step has it everywhere."""
    model = Layers()
    settings = RoundSettings(DiLoCo(0.4), Staggered(6, 3, delay), landing=Mix(0.5))
    engine = Engine.from_settings(model, settings)
    history = []
    for step in range(1, 25):
        approach(rank, model)
        if not torch.isfinite(flat(model)).all():
            for p in model.parameters():
                p.data.fill_(math.nan)
        if step == at and rank == 1:
            model.blocks[0].value.data[3] = math.nan  # type: ignore[union-attr,operator]
        engine.step()
        history.append(flat(model))
    engine.finish()
    engine.close()
    return torch.stack(history), flat(model)


def test_a_worker_with_nan_goes_back_in_all_fragments(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    rows = {f"{delay=} {at=}": (delay, at) for at in (7, 8, 9) for delay in (0, 2, 5, 6)}
    for name, results in run_each(pool, with_nan, rows, world=2).items():
        with subtests.test(name):
            (healthy, end), (broken, same) = results
            assert torch.isfinite(healthy).all()
            assert torch.isfinite(end).all()
            assert torch.equal(end, same)
            _, at = rows[name]
            assert torch.isfinite(broken[at + 6 :]).all()
