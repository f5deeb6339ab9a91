"""A codec with a residual goes through every schedule, the simulation and a checkpoint.

The package ships none; this one is written against the contract alone (tests/rounds/toys.py).
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC, LocalSGD, ModelAverage
from lightning_loco.codecs import Codec, Identity
from lightning_loco.rounds import Engine, RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps
from tests.algorithms.toys import Point, assert_close, randn
from tests.pool import Pool
from tests.rounds.toys import (
    LARGE,
    SMALL_BUCKET,
    Halves,
    Rounding,
    approach,
    flat,
    saved_and_loaded,
    simulate,
    train,
    zeros,
)

ROUNDS = 5
WAYS = [
    pytest.param(DiLoCo(), EverySteps(2), id="diloco"),
    pytest.param(DiLoCo(0.7, 0.3), EverySteps(2, overlap=True), id="late diloco"),
    pytest.param(DiLoCo(), Halves(2), id="diloco by halves"),
    pytest.param(GASLoC(), EverySteps(2), id="gasloc"),
    pytest.param(GASLoC(), EverySteps(2, overlap=True), id="late gasloc"),
    pytest.param(GASLoC(), Halves(2, overlap=True), id="late gasloc by halves"),
    pytest.param(ModelAverage(), EverySteps(2, overlap=True), id="late average"),
]


@pytest.mark.parametrize(("algorithm", "schedule"), WAYS)
def test_same_numbers_in_processes_in_the_simulation_and_after_a_resume(
    pool: Pool, algorithm: Algorithm, schedule: EverySteps
) -> None:
    settings = RoundSettings(algorithm, schedule, codec=Rounding())
    expected = simulate(settings, 3, ROUNDS)
    unbroken = torch.stack(pool.run(train, settings, ROUNDS, world=3), dim=1)
    # float64 sums differ in their last bits, and what lies between two bfloat16 may go either way
    torch.testing.assert_close(unbroken, expected, rtol=0, atol=1e-2)
    near = (unbroken - expected).abs() < 1e-12
    assert near.double().mean() > 0.99
    resumed = torch.stack(pool.run(train, settings, ROUNDS, zeros, 3, world=3), dim=1)
    assert torch.equal(resumed, unbroken)
    exact = simulate(RoundSettings(algorithm, schedule), 3, ROUNDS)
    assert (exact - expected).abs().max() > 1e-6


def by_hand(rounds: int) -> Tensor:
    """Local SGD of two workers with rounded messages: q = round(m + e), e <- m + e - q."""
    models = [Point(torch.zeros(LARGE, dtype=torch.float64)) for _ in range(2)]
    errors = [torch.zeros(LARGE, dtype=torch.float64) for _ in models]
    for _ in range(rounds):
        sent = []
        for worker, model in enumerate(models):
            for _ in range(2):
                approach(worker, model)
            wanted = flat(model) + errors[worker]
            sent.append(wanted.bfloat16().double())
            errors[worker] = wanted - sent[-1]
        for model in models:
            model.value.data.copy_((sent[0] + sent[1]) / 2)
    return flat(models[0])


def test_a_rounded_message_carries_what_was_lost_before(pool: Pool) -> None:
    expected = by_hand(ROUNDS)
    settings = RoundSettings(LocalSGD(), EverySteps(2), codec=Rounding())
    for history in pool.run(train, settings, ROUNDS, world=2):
        assert torch.equal(history[-1], expected)


def race(rank: int, world: int, algorithm: Algorithm) -> dict[str, Any]:
    """Rounds by the clock with constant progress; a checkpoint in between."""
    settings = RoundSettings(
        algorithm, EveryInterval(0.0), codec=Rounding(), bucket_bytes=SMALL_BUCKET
    )
    model = Point(randn(LARGE, seed=99))
    engine = Engine.from_settings(model, settings)
    model.value.data.copy_(randn(LARGE, seed=rank))
    steps = 0
    for part in range(2):
        goal = 4 * (part + 1)
        while engine.statistics.rounds < goal:
            model.value.data.add_(0.01 * (rank + 1))
            steps += 1
            engine.step()
            time.sleep(1e-4)
        engine.worker.meet("a checkpoint")
        saved = saved_and_loaded(engine.state_dict())
        before = flat(model)
        residual = engine.lanes[0].lane.residual["residual"].clone()
        engine.close()
        model = Point(randn(LARGE, seed=99))
        engine = Engine.from_settings(model, settings)
        engine.load_state_dict(saved)
        assert torch.equal(flat(model), before)
        assert torch.equal(engine.lanes[0].lane.residual["residual"], residual)
    engine.close()
    return {"model": flat(model), "residual": residual, "steps": steps}


def test_by_the_clock_nothing_is_lost_but_what_the_residuals_hold(pool: Pool) -> None:
    """The sum of models and residuals moves by the local steps alone."""
    results = pool.run(race, ModelAverage(), world=2)
    total = sum(result["model"] + result["residual"] for result in results)
    start = sum(randn(LARGE, seed=rank) for rank in range(2))
    progress = sum(0.01 * (rank + 1) * r["steps"] for rank, r in enumerate(results))
    assert_close(total, start + progress)
    assert all(result["residual"].abs().max() > 0 for result in results)


def test_a_residual_is_each_workers_own(pool: Pool) -> None:
    first, second = (result["residual"] for result in pool.run(race, ModelAverage(), world=2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("codec", [Identity(), Rounding()], ids=str)
def test_a_codec_reads_its_state_only(codec: Codec) -> None:
    """A round may fail after a message was made."""
    state = codec.init(torch.zeros(6))
    before = {key: value.clone() for key, value in state.items()}
    message = torch.randn(6)
    after = codec.encode(message, state)
    assert after.keys() == state.keys()
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_identity_sends_what_it_is_given() -> None:
    message = torch.randn(5)
    before = message.clone()
    assert Identity().encode(message, Identity().init(message)) == {}
    assert torch.equal(message, before)
    assert Identity().granularity == 1
