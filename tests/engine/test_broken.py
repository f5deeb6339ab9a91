"""A worker with NaN continues from the outer parameters in all fragments, in any round."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import DiLoCo, Mix
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps, Staggered
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.rounds import approach
from tests.harness.small_model import flat, norm_model
from tests.harness.toys import Layers

pytestmark = pytest.mark.recovery


def with_nan(
    rank: int, world: int, delay: int, at: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Put NaN into one layer of worker 1; its next local step spreads it to all layers."""
    model = Layers().to(dtype)
    settings = RoundSettings(DiLoCo(0.4), Staggered(6, 3, delay), merge_policy=Mix(0.5))
    engine = Engine.from_settings(model, settings)
    history = []
    for step in range(1, 19):
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


@pytest.mark.parametrize(
    ("delay", "at", "dtype"),
    cover((0, 1, 2, 3, 5, 6), (7, 8, 9, 10), (torch.float32, torch.bfloat16)),
)
def test_a_worker_with_nan_goes_back_in_all_fragments(
    pool: Pool, delay: int, at: int, dtype: torch.dtype
) -> None:
    (healthy, end), (broken, same) = pool.run(with_nan, delay, at, dtype, world=2)
    assert torch.isfinite(healthy).all()
    assert torch.isfinite(end).all()
    assert torch.equal(end, same)
    assert torch.isfinite(broken[at + 6 :]).all()


def test_sound_outer_parameters_are_shown_although_the_local_ones_are_nan() -> None:
    """As in a save of an elastic member, which is the only worker of its job."""
    model = norm_model()
    engine = Engine.from_settings(model, RoundSettings(DiLoCo(), EverySteps(4)))
    engine.shows_outer = True
    outer, start = engine.outer(), model[1].running_mean.clone()
    assert outer is not None
    for tensor in (*model.parameters(), model[1].running_mean):
        tensor.detach().fill_(math.nan)
    engine.step()
    engine.show_consensus("a checkpoint")
    assert torch.equal(flat(model), outer)
    assert torch.equal(model[1].running_mean, start)
    engine.worker.show_local()
    assert torch.isnan(flat(model)).all()
    engine.shows_outer = False
    with pytest.raises(RuntimeError, match="NaN or infinity on every worker"):
        engine.show_consensus("a checkpoint")
    engine.close()
