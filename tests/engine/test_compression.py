"""Compressed rounds: all workers get the same result, and error feedback keeps what is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC, LocalSGD, ModelAverage, NoLoCo
from lightning_loco.compression import (
    E3M0,
    BFloat16,
    Codec,
    ErrorFeedback,
    Float16,
    Int4,
    Int8,
    Sparse,
)
from lightning_loco.compression.sums import shards
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps
from lightning_loco.simulation import Simulation
from lightning_loco.topology import get_topology
from tests.harness.cover import cover
from tests.harness.pool import Pool, run_each
from tests.harness.rounds import (
    LARGE,
    SMALL_BUCKET,
    Exact,
    Halves,
    approach,
    rounding,
    saved_and_loaded,
    simulate,
    train,
    zeros,
)
from tests.harness.small_model import flat
from tests.harness.toys import Point, assert_close, randn

ROUNDS = 4
WAYS = {
    "diloco": (DiLoCo(), EverySteps(2)),
    "late diloco": (DiLoCo(0.7, 0.3), EverySteps(2, overlap=True)),
    "diloco by halves": (DiLoCo(), Halves(2)),
    "local sgd": (LocalSGD(), EverySteps(2)),
    "gasloc": (GASLoC(), EverySteps(2)),
    "late gasloc": (GASLoC(), EverySteps(2, overlap=True)),
    "late gasloc by halves": (GASLoC(), Halves(2, overlap=True)),
    "noloco": (NoLoCo(), EverySteps(2)),
    "late average": (ModelAverage(), EverySteps(2, overlap=True)),
}
MEANS = {name: way for name, way in WAYS.items() if way[0].exchange == "mean"}
CODECS = [BFloat16(), Float16(), Int8(8), Int4(8), E3M0(8), Sparse(4, 16)]
OF_SENDERS = Sparse(4, 16, mean_over="senders")
SPARSELOCO = {
    "blocking": (DiLoCo(1.0, 0.0), EverySteps(2)),
    "late": (DiLoCo(1.0, 0.0), EverySteps(2, overlap=True)),
    "halves": (DiLoCo(1.0, 0.0), Halves(2)),
    "parameters": (LocalSGD(), EverySteps(2)),
}


def test_same_numbers_in_processes_and_in_the_simulation(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    settings = {
        name: RoundSettings(
            algorithm,
            schedule,
            topology="ring" if algorithm.exchange == "neighbors" else None,
            compression=rounding(algorithm),
        )
        for name, (algorithm, schedule) in WAYS.items()
    }
    rows = {name: (one, ROUNDS, small_wide) for name, one in settings.items()}
    for name, results in run_each(pool, train, rows, world=3).items():
        with subtests.test(name):
            expected = simulate(settings[name], 3, ROUNDS, small_wide)
            found = torch.stack(results, dim=1)
            assert_close(found, expected)
            if settings[name].algorithm.exchange == "mean":
                assert torch.equal(found[:ROUNDS], expected[:ROUNDS])
            uncompressed = dataclasses.replace(settings[name], compression=None)
            exact = simulate(uncompressed, 3, ROUNDS, small_wide)
            assert (exact - expected).abs().max() > 1e-6


def test_in_several_buckets_too(pool: Pool, subtests: pytest.Subtests) -> None:
    """The worker that computes a sum keeps its residual; buckets determine which worker this is."""
    settings = {
        name: RoundSettings(*way, compression=rounding(way[0]), bucket_bytes=SMALL_BUCKET)
        for name, way in MEANS.items()
    }
    rows = {name: (one, ROUNDS, large_wide) for name, one in settings.items()}
    for name, results in run_each(pool, train, rows, world=2).items():
        with subtests.test(name):
            expected = simulate(settings[name], 2, ROUNDS, large_wide)
            assert torch.equal(torch.stack(results, dim=1)[:ROUNDS], expected[:ROUNDS])
            at_once = dataclasses.replace(settings[name], bucket_bytes=64 * 2**20)
            assert not torch.equal(simulate(at_once, 2, ROUNDS, large_wide), expected)


ALIKE = ["diloco", "late gasloc", "noloco", "late average"]
"""Ways whose rounds are similar to others."""


@pytest.mark.recovery
@pytest.mark.parametrize(
    "names",
    [WAYS.keys() - ALIKE, pytest.param(ALIKE, marks=pytest.mark.soak)],
    ids=["all", "alike"],
)
def test_a_resumed_run_is_the_unbroken_one(
    pool: Pool, names: Collection[str], subtests: pytest.Subtests
) -> None:
    """With several buckets, in each of which a worker sums its part of the elements."""
    rows = {
        (name, after): (RoundSettings(*way, compression=rounding(way[0])), ROUNDS, zeros, after)
        for name, way in WAYS.items()
        for after in (None, 2)
        if name in names
    }
    results = run_each(pool, train, rows, world=2)
    for name in names:
        with subtests.test(name):
            unbroken, resumed = (torch.stack(results[name, after]) for after in (None, 2))
            assert torch.equal(resumed, unbroken)


def test_a_codec_that_loses_nothing_changes_nothing(pool: Pool, subtests: pytest.Subtests) -> None:
    """Two numbers have the same sum in either order, and two workers the same mix."""
    rows = {
        (name, codec): (RoundSettings(*way, compression=codec), ROUNDS, small_wide)
        for name, way in WAYS.items()
        for codec in (None, Exact())
    }
    results = run_each(pool, train, rows, world=2)
    for name, (algorithm, _) in WAYS.items():
        with subtests.test(name):
            expected, found = (torch.stack(results[name, codec]) for codec in (None, Exact()))
            if algorithm.exchange == "mean" and not algorithm.sends_parameters:
                assert torch.equal(found, expected)
            else:  # adds the parameters that it has subtracted
                assert_close(found, expected)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "codec", "world"),
    cover(
        [pytest.param(*way, id=name) for name, way in MEANS.items()],
        [pytest.param(codec, id=str(codec)) for codec in (*CODECS, OF_SENDERS)],
        (2, 3, 4),
        strength=1,
    ),
)
def test_workers_stay_bit_identical(
    pool: Pool, algorithm: Algorithm, schedule: EverySteps, codec: Codec, world: int
) -> None:
    settings = RoundSettings(algorithm, schedule, compression=ErrorFeedback(codec))
    histories = pool.run(train, settings, 5, small, world=world)
    if not isinstance(algorithm, ModelAverage):
        same = slice(None) if schedule.num_fragments == 1 else slice(-1, None)
        for history in histories[1:]:
            assert torch.equal(history[same], histories[0][same])
    assert all(torch.isfinite(history).all() for history in histories)


def small() -> Point:
    return Point(torch.zeros(150))


@pytest.fixture(scope="module")
def pool_of_five() -> Iterator[Pool]:
    """Start one process more than the pool has."""
    with contextlib.closing(Pool(5)) as pool:
        yield pool


@pytest.mark.soak
@pytest.mark.parametrize(
    "schedule",
    [EverySteps(1), EverySteps(1, overlap=True), Halves(2), Halves(2, overlap=True)],
    ids=["blocking", "overlap", "halves", "late halves"],
)
def test_workers_are_bit_identical_after_a_hundred_rounds(
    pool_of_five: Pool, schedule: EverySteps, subtests: pytest.Subtests
) -> None:
    last = slice(None) if schedule.num_fragments == 1 else slice(-1, None)
    for world, codec in itertools.product((2, 3, 4, 5), (Int8(8), E3M0(8), Sparse(4, 16))):
        with subtests.test(str(codec), world=world):
            settings = RoundSettings(DiLoCo(0.7, 0.3), schedule, compression=ErrorFeedback(codec))
            first, *others = pool_of_five.run(train, settings, 100, small, world=world)
            assert all(torch.equal(history[last], first[last]) for history in others)


# ------------------------------------------------------------------------------ plain loops


def written(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), torch.empty_like(values))


def diloco_by_hand(codec: Codec, num_workers: int, rounds: int, lr: float) -> Tensor:
    """Compute DiLoCo with outer SGD and error feedback, on each worker and for each shard's sum.

    With the mean over senders, a sum is divided by the number of workers that sent the value.
    """
    outer = torch.zeros(150, dtype=torch.float64)
    models = [Point(outer.clone()) for _ in range(num_workers)]
    left = [torch.zeros_like(outer) for _ in models]
    for _ in range(rounds):
        total, count = torch.zeros_like(outer), torch.zeros_like(outer)
        for worker, model in enumerate(models):
            for _ in range(2):
                approach(worker, model)
            wanted = outer - flat(model) + left[worker]
            sent = written(codec, wanted)
            left[worker] = wanted - sent
            total += sent
            count += sent != 0
        mean = total
        if not codec.is_sparse:
            mean = written(codec, total)
            for worker, shard in enumerate(shards(codec, 150, num_workers)):
                left[worker][shard.values] += (total - mean)[shard.values]
        outer = outer - lr * mean / (count.clamp(1) if codec.averages_senders else num_workers)
        for model in models:
            model.value.data.copy_(outer)
    return outer


def small_wide() -> Point:
    return Point(torch.zeros(150, dtype=torch.float64))


def large_wide() -> Point:
    return Point(torch.zeros(LARGE, dtype=torch.float64))


@pytest.mark.parametrize(
    ("codec", "world"),
    [
        *cover([pytest.param(codec, id=str(codec)) for codec in CODECS], (1, 2, 4), strength=1),
        pytest.param(OF_SENDERS, 3, id="senders"),
    ],
)
def test_diloco_is_its_plain_loop(pool: Pool, codec: Codec, world: int) -> None:
    settings = RoundSettings(DiLoCo(0.5, 0.0), EverySteps(2), compression=ErrorFeedback(codec))
    expected = diloco_by_hand(codec if world > 1 else Exact(), world, ROUNDS, 0.5)
    for history in pool.run(train, settings, ROUNDS, small_wide, world=world):
        assert_close(history[-1], expected)


def test_means_over_senders_in_processes_are_those_of_the_simulation(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """A worker that has not sent a value does not count: in one or several buckets, and resumed."""
    settings = {
        name: RoundSettings(*way, compression=ErrorFeedback(OF_SENDERS, 0.95))
        for name, way in SPARSELOCO.items()
    }
    rows = {
        (name, after): (one, ROUNDS, large_wide, after)
        for name, one in settings.items()
        for after in (None, 2)
    }
    results = run_each(pool, train, rows, world=3)
    for name, one in settings.items():
        with subtests.test(name):
            unbroken, resumed = (torch.stack(results[name, after], 1) for after in (None, 2))
            expected = simulate(
                dataclasses.replace(one, bucket_bytes=SMALL_BUCKET), 3, ROUNDS, large_wide
            )
            assert torch.equal(unbroken[:ROUNDS], expected[:ROUNDS])
            assert torch.equal(resumed, unbroken)
            over_all = dataclasses.replace(one, compression=ErrorFeedback(Sparse(4, 16), 0.95))
            assert not torch.equal(simulate(over_all, 3, ROUNDS, large_wide), expected)


def test_a_worker_with_nan_does_not_count_as_a_sender() -> None:
    """Worker 0 sends the first 4 of 16 values, and worker 2 the next 4."""
    models = [Point(torch.zeros(16, dtype=torch.float64)) for _ in range(3)]
    settings = RoundSettings(DiLoCo(1.0, 0.0), EverySteps(1), compression=ErrorFeedback(OF_SENDERS))
    simulation = Simulation.from_settings(models, settings)

    def local_step(worker: int) -> None:
        models[worker].value.data.fill_(torch.nan if worker == 1 else 0.0)
        if worker != 1:
            models[worker].value.data[2 * worker : 2 * worker + 4] = worker + 1.0

    simulation.run(local_step, 1)
    expected = torch.zeros(16, dtype=torch.float64)
    expected[:4], expected[4:8] = 1.0, 3.0
    assert_close(simulation.consensus(), expected)


def test_what_is_lost_is_in_the_residuals(pool: Pool, subtests: pytest.Subtests) -> None:
    """With outer SGD(1), outer parameters plus mean residual equal the run without compression.

    Proposals are linear in the workers' starts, so a delayed part is not lost.
    """
    rows = {
        str(codec): (RoundSettings(LocalSGD(), EverySteps(1), compression=ErrorFeedback(codec)),)
        for codec in CODECS
    }
    for name, results in run_each(pool, hold, rows, world=3).items():
        with subtests.test(name):
            total = sum(params - residual for params, residual in results)
            assert_close(total, sum(randn(150, seed=worker) for worker in range(3)))


def hold(rank: int, world: int, settings: RoundSettings) -> tuple[Tensor, Tensor]:
    """Take one step to a random point, then run rounds without progress."""
    model = small_wide()
    engine = Engine.from_settings(model, settings)
    model.value.data.copy_(randn(150, seed=rank))
    engine.step()
    residual = engine.fragments[0].memory.residual["residual"].clone()
    result = flat(model), -residual
    engine.close()
    return result


# ------------------------------------------------------------------------------------ gossip


@pytest.mark.soak
@pytest.mark.parametrize("topology", ["ring", "random_matching", "one_peer_exponential"])
def test_gossip_keeps_the_mean_and_comes_together(
    pool: Pool, topology: str, subtests: pytest.Subtests
) -> None:
    """Up to the distance at which two numbers have the same encoding."""
    starts = torch.stack([randn(150, seed=worker) for worker in range(4)])
    for codec, step in ((BFloat16(), 2**-7), (Float16(), 2**-10), (Int8(8), 1 / 127)):
        with subtests.test(str(codec)):
            settings = RoundSettings(
                GASLoC(1.0, momentum=0.0), EverySteps(1), get_topology(topology), compression=codec
            )
            found = torch.stack(pool.run(gossip, settings, 150, world=4))
            assert_close(found.mean(0), starts.mean(0))
            largest = found.abs().max()
            assert 0 < (found - found.mean(0)).abs().max() < 2 * step * largest
            assert (starts - starts.mean(0)).abs().max() > 100 * step


def gossip(rank: int, world: int, settings: RoundSettings, rounds: int) -> Tensor:
    """Run rounds after one step to a random point."""
    model = small_wide()
    engine = Engine.from_settings(model, settings)
    model.value.data.copy_(randn(150, seed=rank))
    for _ in range(rounds):
        engine.step()
    result = flat(model)
    engine.close()
    return result


# ------------------------------------------------------------------------------ by the clock


STEP = 2.0**-6
"""A power of two, so that sums of any number of steps are exact."""


def race(rank: int, world: int, algorithm: Algorithm) -> dict[str, Any]:
    """Run rounds by the clock with constant progress and a checkpoint in between."""
    settings = RoundSettings(
        algorithm,
        EveryInterval(0.0),
        compression=rounding(algorithm),
        bucket_bytes=SMALL_BUCKET,
    )
    model = Point(randn(LARGE, seed=99))
    engine = Engine.from_settings(model, settings)
    model.value.data.copy_(randn(LARGE, seed=rank))
    steps = 0
    for part in range(2):
        goal = 4 * (part + 1)
        while engine.statistics.rounds < goal:
            model.value.data.add_(STEP * (rank + 1))
            steps += 1
            engine.step()
            time.sleep(1e-4)
        engine.sync_point("a checkpoint")
        saved = saved_and_loaded(engine.state_dict())
        before = flat(model)
        residual = engine.fragments[0].memory.residual["residual"].clone()
        engine.close()
        model = Point(randn(LARGE, seed=99))
        engine = Engine.from_settings(model, settings)
        engine.load_state_dict(saved)
        assert torch.equal(flat(model), before)
        assert torch.equal(engine.fragments[0].memory.residual["residual"], residual)
    engine.close()
    return {"model": flat(model), "residual": residual, "steps": steps}


def test_by_the_clock_nothing_is_lost_but_what_the_residuals_hold(pool: Pool) -> None:
    """Only local steps change the sum of models and residuals."""
    results = pool.run(race, ModelAverage(), world=2)
    total = sum(result["model"] + result["residual"] for result in results)
    start = sum(randn(LARGE, seed=rank) for rank in range(2))
    progress = sum(STEP * (rank + 1) * r["steps"] for rank, r in enumerate(results))
    assert_close(total, start + progress)
    assert all(result["residual"].abs().max() > 0 for result in results)
    first, second = (result["residual"] for result in results)
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------ what goes wrong


def stumble(rank: int, world: int, overlap: bool) -> dict[str, Any]:
    """Give worker 1 NaN in the third round."""
    settings = RoundSettings(
        DiLoCo(0.7, 0.0), EverySteps(1, overlap), compression=ErrorFeedback(Int4(8))
    )
    model = small_wide()
    engine = Engine.from_settings(model, settings)
    for step in range(3):
        approach(rank, model)
        if step == 2:
            before = engine.fragments[0].memory.residual["residual"].clone()
            if rank == 1:
                model.value.data[3] = torch.nan
        engine.step()
    engine.finish()
    residual = engine.fragments[0].memory.residual["residual"].clone()
    result = {"params": flat(model), "before": before, "residual": residual}
    engine.close()
    return result


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_with_nan_keeps_its_residual_and_harms_no_other(pool: Pool, overlap: bool) -> None:
    first, second, third = pool.run(stumble, overlap, world=3)
    assert torch.isfinite(first["params"]).all()
    assert torch.equal(first["params"], second["params"])
    own = shards(Int4(8), 150, 3)[1].values
    others = torch.ones(150, dtype=torch.bool)
    others[own] = False
    if not overlap:  # an overlapped round has changed them meanwhile
        assert torch.equal(second["residual"][others], second["before"][others])
    assert not torch.equal(third["residual"], third["before"])


def vanish(rank: int, world: int, overlap: bool) -> str:
    settings = RoundSettings(DiLoCo(0.7, 0.0), EverySteps(1, overlap), compression="int8")
    engine = Engine.from_settings(small_wide(), settings, WorkerGroup.create(timeout_s=2))
    engine.step()
    engine.step()
    if rank == 1:
        engine.close()
        return ""
    error = ""
    while not error:
        try:
            engine.step()
        except RuntimeError as raised:
            error = str(raised)
    engine.close()
    return error


@pytest.mark.process
@pytest.mark.parametrize("overlap", [False, True])
def test_who_is_missing_is_named(pool: Pool, overlap: bool) -> None:
    errors = pool.run(vanish, overlap, world=3)
    assert "worker 1" in errors[0].lower()
    assert "worker 1" in errors[2].lower()


def test_bytes_are_those_of_the_codec(pool: Pool) -> None:
    rows = {
        compression: (RoundSettings(DiLoCo(), EverySteps(1), compression=compression),)
        for compression in (None, "int8", "e3m0", "sparse")
    }
    sent = {
        name: bytes_sent
        for name, (bytes_sent, _) in run_each(pool, count_bytes, rows, world=2).items()
    }
    assert sent["int8"] <= 0.27 * sent[None]
    assert sent["e3m0"] <= 0.145 * sent[None]
    assert sent["sparse"] <= 0.02 * sent[None]


def count_bytes(rank: int, world: int, settings: RoundSettings) -> int:
    model = Point(torch.zeros(10 * 4096))
    engine = Engine.from_settings(model, settings)
    before = engine.statistics.bytes_sent
    approach(rank, model)
    engine.step()
    sent = engine.statistics.bytes_sent - before
    engine.close()
    return sent
