"""The encoding error of a message stays in the worker's model: the worker itself loses nothing."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    Elastic,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.algorithms import Algorithm, DelayedNesterov, DiLoCo, GASLoC, LocalSGD
from lightning_loco.compression import E3M0, Codec, Compensated, ErrorFeedback, Int8, Sparse
from lightning_loco.compression.sums import shards
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps
from tests.harness.cover import cover
from tests.harness.pool import Pool, run_each
from tests.harness.rounds import Exact, approach, simulate, train, zeros
from tests.harness.small_model import flat
from tests.harness.toys import Point, assert_close

ROUNDS, STEPS, NUMEL = 4, 2, 150
CODECS = [Int8(8), E3M0(8), Sparse(4, 16)]
ALGORITHMS = {
    "diloco": DiLoCo(2.0, 0.3),
    "delayed nesterov": DelayedNesterov(),
    "local sgd": LocalSGD(),
}


def small() -> Point:
    return Point(torch.zeros(NUMEL, dtype=torch.float64))


def settings_of(algorithm: Algorithm, codec: Codec) -> RoundSettings:
    return RoundSettings(algorithm, EverySteps(STEPS), compression=Compensated(codec))


def by_hand(codec: Codec, world: int, lr: float, momentum: float) -> Tensor:
    """Compute the formula of the class: parameters after each round, and their mean."""
    outer, buffer = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    models = [small() for _ in range(world)]
    history = []
    for _ in range(ROUNDS):
        lost, total = [], torch.zeros(NUMEL).double()
        for worker, model in enumerate(models):
            for _ in range(STEPS):
                approach(worker, model)
            wanted = outer - flat(model)
            sent = written(codec, wanted)
            lost.append(wanted - sent)
            total += sent
        if not codec.is_sparse:
            mean = written(codec, total)
            for worker, shard in enumerate(shards(codec, NUMEL, world)):
                lost[worker][shard.values] += (total - mean)[shard.values]
            total = mean
        buffer = momentum * buffer + total / world
        outer = outer - lr * (total / world + momentum * buffer)
        for model, own in zip(models, lost, strict=True):
            model.value.data.copy_(outer - own)
        history.append(torch.stack([flat(model) for model in models]))
    return torch.stack([*history, history[-1].mean(0).expand(world, -1)])


def written(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), torch.empty_like(values))


codecs = [pytest.param(codec, id=str(codec)) for codec in CODECS]


@pytest.mark.parametrize(("codec", "world"), cover(codecs, (2, 4), strength=1))
def test_it_is_its_formula(pool: Pool, codec: Codec, world: int) -> None:
    settings = settings_of(DiLoCo(1.5, 0.3), codec)
    found = torch.stack(pool.run(train, settings, ROUNDS, small, world=world), dim=1)
    assert_close(found, by_hand(codec, world, 1.5, 0.3))


@pytest.mark.parametrize(("name", "codec"), cover(ALGORITHMS, codecs, strength=1))
def test_same_numbers_in_processes_and_in_the_simulation(
    pool: Pool, name: str, codec: Codec
) -> None:
    settings = settings_of(ALGORITHMS[name], codec)
    expected = simulate(settings, 3, ROUNDS, small)
    found = torch.stack(pool.run(train, settings, ROUNDS, small, world=3), dim=1)
    assert torch.equal(found[:-1], expected[:-1])
    assert_close(found[-1], expected[-1])  # the sum has another order
    fed_back = dataclasses.replace(settings, compression=ErrorFeedback(codec))
    assert (simulate(fed_back, 3, ROUNDS, small) - expected).abs().max() > 1e-4


def test_the_mean_is_that_without_compression(pool: Pool, subtests: pytest.Subtests) -> None:
    """Local steps are linear here, so if one round keeps the mean, all rounds do."""
    for name, algorithm in {"diloco": DiLoCo(1.0, 0.0), "local sgd": LocalSGD()}.items():
        settings = {str(codec): settings_of(algorithm, codec) for codec in CODECS}
        settings["none"] = RoundSettings(algorithm, EverySteps(STEPS))
        rows = {codec: (one, ROUNDS, small) for codec, one in settings.items()}
        results = run_each(pool, train, rows, world=2)
        exact = results.pop("none")
        for codec, found in results.items():
            with subtests.test(f"{name}, {codec}"):
                assert (found[0] - found[1])[:-1].abs().max() > 1e-3
                torch.testing.assert_close(sum(found) / 2, sum(exact) / 2, rtol=0, atol=1e-12)


def test_a_codec_that_loses_nothing_changes_nothing(pool: Pool, subtests: pytest.Subtests) -> None:
    rows = {
        (name, codec): (RoundSettings(one, EverySteps(STEPS), compression=codec), ROUNDS, small)
        for name, one in ALGORITHMS.items()
        for codec in (None, Compensated(Exact()))
    }
    results = run_each(pool, train, rows, world=2)
    for name in ALGORITHMS:
        with subtests.test(name):
            found, plain = results[name, Compensated(Exact())], results[name, None]
            assert_close(torch.stack(found), torch.stack(plain))


@pytest.mark.recovery
def test_a_resumed_run_is_the_unbroken_one_in_several_buckets(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    rows = {
        (name, after): (settings_of(algorithm, Sparse(4, 16)), ROUNDS, zeros, after)
        for name, algorithm in ALGORITHMS.items()
        for after in (None, 2)
    }
    results = run_each(pool, train, rows, world=2)
    for name in ALGORITHMS:
        with subtests.test(name):
            unbroken, resumed = (torch.stack(results[name, after]) for after in (None, 2))
            assert torch.equal(resumed, unbroken)


def in_bfloat16(rank: int, world: int, codec: Codec) -> list[Tensor]:
    """Run rounds without local steps; they change parameters only by rounding in bfloat16."""
    model = Point(torch.zeros(NUMEL, dtype=torch.bfloat16))
    engine = Engine.from_settings(
        model, RoundSettings(DiLoCo(1.0, 0.0), EverySteps(1), compression=Compensated(codec))
    )
    approach(rank, model)
    engine.step()
    seen = [flat(model).float()]
    for _ in range(3):
        engine.step()
        fragment = engine.fragments[0].memory
        begun = fragment.state["outer"] - fragment.residual["residual"]
        assert torch.equal(flat(model), begun.bfloat16())
        seen.append(begun)
    engine.close()
    return seen


def test_narrow_parameters_lose_nothing_to_rounding(pool: Pool) -> None:
    found = pool.run(in_bfloat16, Sparse(4, 16), world=2)
    means = (torch.stack(found[0]) + torch.stack(found[1])) / 2
    torch.testing.assert_close(means[1:], means[1].expand(3, -1), rtol=0, atol=1e-6)


def stumble(rank: int, world: int) -> dict[str, Tensor]:
    """Give worker 1 NaN in the third round."""
    model = small()
    engine = Engine.from_settings(model, settings_of(DiLoCo(0.7, 0.0), Sparse(4, 16)))
    fragment = engine.fragments[0].memory
    for step in range(3 * STEPS):
        approach(rank, model)
        if step == 3 * STEPS - 1:
            before = fragment.residual["residual"].clone()
            if rank == 1:
                model.value.data[3] = torch.nan
        engine.step()
    outer, residual = fragment.state["outer"].clone(), fragment.residual["residual"].clone()
    found = {"outer": outer, "local": flat(model), "before": before, "residual": residual}
    engine.finish()
    engine.close()
    return {**found, "final": flat(model)}


def test_a_worker_with_nan_goes_on_with_what_it_had_left(pool: Pool) -> None:
    results = pool.run(stumble, world=3)
    for found in results:
        assert torch.equal(found["outer"], results[0]["outer"])
        assert torch.equal(found["local"], found["outer"] - found["residual"])
        assert_close(found["final"], sum(one["local"] for one in results) / 3)
    assert torch.equal(results[1]["residual"], results[1]["before"])
    assert not torch.equal(results[2]["residual"], results[2]["before"])


def work_alone(rank: int, world: int) -> bool:
    """Let worker 0 take no more steps, and serve the others' rounds."""
    model = small()
    engine = Engine.from_settings(model, settings_of(DiLoCo(1.0, 0.0), Sparse(4, 16)))
    fragment = engine.fragments[0].memory
    for _ in range(STEPS):
        approach(rank, model)
        engine.step()
    before = fragment.residual["residual"].clone()
    for _ in range(2 * STEPS * (rank > 0)):
        approach(rank, model)
        engine.step()
    engine.sync_point("the end of an epoch")
    kept = torch.equal(fragment.residual["residual"], before)
    kept = kept and torch.equal(
        flat(model), fragment.state["outer"] - fragment.residual["residual"]
    )
    engine.finish()
    engine.close()
    return kept


def test_a_worker_without_data_keeps_what_it_has_not_sent(pool: Pool) -> None:
    assert pool.run(work_alone, world=3) == [True, False, False]


BLOCKING = "Use compression=ErrorFeedback"


def test_what_it_does_not_go_with_is_refused(subtests: pytest.Subtests) -> None:
    blocking, alone = "Use compression=ErrorFeedback", "Give the codec alone"
    given = {"compression": Compensated(Int8())}
    rows: dict[str, tuple[Any, str]] = {
        "overlap": (partial(LocoStrategy, DiLoCo(0.7, 0.0), overlap=True), blocking),
        "fragments": (StreamingDiLoCoStrategy, blocking),
        "by the clock": (AsyncModelAverageStrategy, blocking),
        "elastic": (partial(DiLoCoStrategy, membership=Elastic("localhost:1")), blocking),
        "pairs": (PairwiseGossipStrategy, alone),
        "remote": (partial(RemoteOptimizerStrategy, 2), alone),
    }
    for name, (make, text) in rows.items():
        with subtests.test(name), pytest.raises(ValueError, match=text):
            make(**given).settings.prepare(2)


def test_gossip_does_it_by_itself() -> None:
    settings = RoundSettings(GASLoC(), topology="ring", compression=Compensated(Int8()))
    with pytest.raises(ValueError, match="Gossip keeps the mean .* Give the codec alone"):
        settings.prepare(4)


@pytest.mark.parametrize("codec", ["int8", None, ErrorFeedback(Int8())])
def test_it_takes_a_codec(codec: Any) -> None:
    with pytest.raises(TypeError, match=r"a codec such as Sparse\(\), got"):
        Compensated(codec)
