"""A round that was pending in another run, against the formula on whole vectors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps
from tests.harness.rounds import LARGE, SMALL_BUCKET, Counting
from tests.harness.small_model import flat
from tests.harness.toys import Point, randn, updated

ALGORITHMS = [DiLoCo(0.7, 0.3), DiLoCo(outer_optimizer=torch.optim.Adam), Counting(), GASLoC()]


def apply_pending(
    algorithm: Algorithm, pending: dict[str, Any], params: Tensor
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """Return the parameters of a single worker, and its state before and after the late round."""
    model = Point(randn(LARGE, seed=1))
    settings = RoundSettings(algorithm, EverySteps(2), bucket_bytes=SMALL_BUCKET)
    engine = Engine.from_settings(model, settings)
    model.value.data.copy_(params)
    fragment = engine.fragments[0].memory
    before = copy.deepcopy(fragment.state)
    engine.fragments[0].apply_saved(pending, steps=0)
    after = copy.deepcopy(fragment.state)
    engine.close()
    return flat(model), before, after


def test_parameters_move_by_the_result(subtests: pytest.Subtests) -> None:
    for algorithm, keeps_params in itertools.product(ALGORITHMS, (False, True)):
        with subtests.test(str(algorithm), keeps_params=keeps_params):
            received, message, at_send = (randn(LARGE, seed=seed) for seed in (2, 3, 4))
            params = randn(LARGE, seed=5)
            sent_params = at_send if keeps_params else None
            pending = {
                "received": received,
                "messages": message,
                "sent_params": sent_params,
                "index": 0,
                "began_at": 0,
                "statuses": [],
            }
            found, before, after = apply_pending(algorithm, pending, params)
            prepared = RoundSettings(algorithm).prepare(1).algorithm
            start = at_send if keeps_params else prepared.round_start(before)
            assert start is not None
            start = start.clone()
            result = updated(prepared, params, message.clone(), received.clone(), before).clone()
            torch.testing.assert_close(found, result + (params - start), rtol=0, atol=1e-13)
            assert before.keys() == after.keys()
            for name, value in before.items():
                torch.testing.assert_close(
                    torch.as_tensor(after[name]), torch.as_tensor(value), rtol=0, atol=1e-13
                )


def test_parameters_that_are_not_finite_become_the_result() -> None:
    params = randn(LARGE, seed=5)
    params[7] = float("nan")
    pending = {"received": randn(LARGE, seed=2), "sent_params": None}
    pending |= {"index": 0, "began_at": 0, "statuses": []}
    found, _, after = apply_pending(Counting(), pending, params)
    assert torch.isfinite(found).all()
    assert torch.equal(found[7], after["outer"][7])
