"""A worker of two ranks, each with a shard of the model, makes the rounds of one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import Algorithm, DiLoCo, GASLoC, LocalSGD, NoLoCo, Simulation
from lightning_loco.algorithms import ModelAverage
from lightning_loco.compression import Int8
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps
from tests.algorithms.toys import randn
from tests.pool import Pool

NUM_WORKERS = REPLICA_SIZE = 2
NUMEL, CUT = 40, 16  # the first place holds 16 elements, the second one 24
SHARDS = slice(0, CUT), slice(CUT, NUMEL)
SYNC_EVERY, ROUNDS = 3, 8
TARGETS = randn(NUM_WORKERS, NUMEL)


class Shard(nn.Module):
    """Some of the elements of a vector."""

    def __init__(self, elements: slice) -> None:
        super().__init__()
        self.value = nn.Parameter(randn(NUMEL, seed=9)[elements].clone())


def approach(model: Shard, worker: int, elements: slice, step: int) -> None:
    """An elementwise local step, whose size changes from step to step."""
    target = TARGETS[worker][elements]
    model.value.data.add_(target - model.value.data, alpha=0.05 + 0.02 * (step % 4))


def settings_of(algorithm: Algorithm, overlap: bool, compression: Any) -> RoundSettings:
    schedule = EverySteps(SYNC_EVERY, overlap=overlap)
    return RoundSettings(algorithm, schedule, compression=compression)


def unsharded(
    algorithm: Algorithm, overlap: bool, compression: Any = None, nan_at: int | None = None
) -> Tensor:
    """The workers' parameters after the rounds, ``(N, P)``: each worker is one rank."""
    models = [Shard(slice(0, NUMEL)) for _ in range(NUM_WORKERS)]
    simulation = Simulation.from_settings(models, settings_of(algorithm, overlap, compression))
    steps = [0] * NUM_WORKERS

    def local_step(worker: int) -> None:
        approach(models[worker], worker, slice(0, NUMEL), steps[worker])
        if worker == 1 and steps[worker] == nan_at:
            models[worker].value.data[NUMEL - 1] = math.nan
        steps[worker] += 1

    simulation.run(local_step, ROUNDS)
    simulation.drain()
    return torch.stack(simulation.params())


def train_shard(
    rank: int,
    world: int,
    algorithm: Algorithm,
    overlap: bool,
    compression: Any = None,
    nan_at: int | None = None,
) -> dict[str, Any]:
    torch.manual_seed(rank)  # the ranks of a worker draw the same pairs all the same
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    worker, place = divmod(rank, REPLICA_SIZE)
    assert (group.worker, group.place, group.num_workers) == (worker, place, NUM_WORKERS)
    model = Shard(SHARDS[place])
    settings = settings_of(algorithm, overlap, compression)
    engine = Engine.from_settings(model, settings, group)
    engine.measure_outer_gradient, engine.consensus_every = True, 1
    engine.consensus_elements = NUMEL
    for step in range(ROUNDS * SYNC_EVERY):
        approach(model, worker, SHARDS[place], step)
        if (rank, step) == (3, nan_at):
            model.value.data[-1] = math.nan
        engine.worker.last_loss = float(rank)
        engine.step()
    engine.drain()
    statistics = engine.statistics
    found = {
        "params": model.value.detach().clone(),
        "topology": repr(engine.settings.topology),
        "norm": statistics.outer_grad_norm,
        "distance": statistics.consensus_distance,
        "losses": statistics.losses,
    }
    engine.finish()
    found["consensus"] = model.value.detach().clone()
    engine.close()
    return found


def joined(results: list[dict[str, Any]], name: str) -> Tensor:
    """The vectors of all workers, ``(N, P)``, from the shards of their ranks."""
    shards = [result[name] for result in results]
    return torch.stack([torch.cat(shards[:REPLICA_SIZE]), torch.cat(shards[REPLICA_SIZE:])])


CASES = {
    "local_sgd": (LocalSGD(), False, None),
    "diloco": (DiLoCo(0.7, 0.5), False, None),
    "diloco overlapped": (DiLoCo(0.7, 0.3), True, None),
    "diloco int8": (DiLoCo(0.7, 0.5), False, Int8(8)),
    "diloco trimmed mean": (DiLoCo(0.7, 0.5, aggregate="trimmed_mean"), False, None),
    "gasloc": (GASLoC(), False, None),
    "gasloc overlapped": (GASLoC(), True, None),
    "gasloc int8": (GASLoC(), False, Int8(8)),
    "noloco": (NoLoCo(), False, None),
}


@pytest.mark.filterwarnings("ignore:.*cannot tell which of 2 workers is wrong:UserWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_shards_give_what_whole_models_give(pool: Pool, name: str) -> None:
    algorithm, overlap, compression = CASES[name]
    expected = unsharded(algorithm, overlap, compression)
    results = pool.run(train_shard, algorithm, overlap, compression, world=4)
    torch.testing.assert_close(joined(results, "params"), expected, rtol=0, atol=1e-11)
    consensus = expected.mean(0).expand(NUM_WORKERS, -1)
    torch.testing.assert_close(joined(results, "consensus"), consensus, rtol=0, atol=1e-11)
    assert len({result["topology"] for result in results}) == 1


def train_whole(rank: int, world: int, algorithm: Algorithm) -> dict[str, Any]:
    """The same with one rank per worker."""
    group = WorkerGroup.create(timeout_s=30)
    model = Shard(slice(0, NUMEL))
    engine = Engine.from_settings(model, settings_of(algorithm, False, None), group)
    engine.measure_outer_gradient, engine.consensus_every = True, 1
    engine.consensus_elements = NUMEL
    for step in range(ROUNDS * SYNC_EVERY):
        approach(model, rank, slice(0, NUMEL), step)
        engine.step()
    found = {"norm": engine.statistics.outer_grad_norm}
    found["distance"] = engine.statistics.consensus_distance
    engine.close()
    return found


@pytest.mark.parametrize("algorithm", [DiLoCo(0.7, 0.5), GASLoC()], ids=str)
def test_sums_over_the_ranks_of_a_worker_count_each_element_once(
    pool: Pool, algorithm: Algorithm
) -> None:
    whole = pool.run(train_whole, algorithm, world=2)
    for rank, found in enumerate(pool.run(train_shard, algorithm, False, world=4)):
        expected = whole[rank // REPLICA_SIZE]
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-11)
        assert found["distance"] == pytest.approx(expected["distance"], rel=1e-11)
        assert found["losses"] == [0.5, 2.5]  # the mean over the ranks of each worker


@pytest.mark.parametrize("name", ["diloco", "gasloc", "diloco overlapped"])
def test_nan_in_one_shard_leaves_the_whole_worker_out(pool: Pool, name: str) -> None:
    algorithm, overlap, compression = CASES[name]
    expected = unsharded(algorithm, overlap, compression, nan_at=4)
    assert torch.isfinite(expected).all()
    results = pool.run(train_shard, algorithm, overlap, compression, 4, world=4)
    torch.testing.assert_close(joined(results, "params"), expected, rtol=0, atol=1e-11)
    plain = unsharded(algorithm, overlap, compression)
    assert (expected - plain).abs().max() > 1e-3


def average_by_time(rank: int, world: int) -> dict[str, Any]:
    """Asynchronous averaging; which rounds begin and end when is the decision of place 0."""
    group = WorkerGroup.create(timeout_s=30, replica_size=REPLICA_SIZE)
    worker, place = divmod(rank, REPLICA_SIZE)
    model = Shard(SHARDS[place])
    engine = Engine.from_settings(model, RoundSettings(ModelAverage(), EveryInterval(0.0)), group)
    history = []
    while engine.worker.round_index < 4:
        step = engine.worker.steps
        approach(model, worker, SHARDS[place], step)
        engine.step()
        history.append((engine.worker.round_index, engine.fragments[0].pending is None))
    engine.finish()
    engine.close()
    return {"history": history, "params": model.value.detach().clone()}


def test_the_ranks_of_a_worker_begin_and_end_rounds_by_time_together(pool: Pool) -> None:
    results = pool.run(average_by_time, world=4)
    for worker in range(NUM_WORKERS):
        first, second = results[REPLICA_SIZE * worker : REPLICA_SIZE * (worker + 1)]
        assert first["history"] == second["history"]
        assert first["history"][-1][0] == 4
    params = joined(results, "params")
    assert torch.equal(params[0], params[1])


def fail(rank: int, world: int, failing: int) -> str:
    group = WorkerGroup.create(timeout_s=20, replica_size=REPLICA_SIZE)
    error = ValueError("it does not fit") if rank == failing else None
    try:
        group.raise_together(error, "a test")
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        group.close()
    return "no error"


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    for failing in range(4):
        for rank, text in enumerate(pool.run(fail, failing, world=4)):
            assert text.startswith("ValueError: ")
            assert "it does not fit" in text
            if rank != failing:
                assert f"Worker {failing // 2}" in text


def refused(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="does not divide the 3 ranks") as error:
        WorkerGroup.create(replica_size=2)
    return str(error.value)


def test_a_number_of_ranks_that_is_no_multiple_is_refused(pool: Pool) -> None:
    assert len(set(pool.run(refused, world=3))) == 1
