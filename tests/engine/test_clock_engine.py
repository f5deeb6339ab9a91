"""Rounds by the clock: properties of asynchronous averaging, with real processes."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import ClockEngine, PairwiseEngine
from tests.harness.limits import SOON_S, wait_until
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import flat, loss_of, make_model, train_step, worker_batch

TOPOLOGIES = [None, "ring", "random_matching"]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


def wait_until_due(engine: ClockEngine, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not engine.check_due():
        assert time.monotonic() < deadline, "nothing has arrived"
        time.sleep(0.001)


def average_once(engine: ClockEngine) -> None:
    """Run one round from start to end."""
    for _ in range(2):
        wait_until_due(engine)
        engine.make_round()


class Numbers(nn.Module):
    """A model with a single float64 vector."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.double())


def worker_values(rank: int) -> Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def start(rank: int, topology: str | None = None, **settings: Any) -> tuple[Numbers, ClockEngine]:
    model = Numbers(torch.zeros(1000))
    engine = ClockEngine(model, interval_s=0, topology=topology, **settings)
    model.values.data.copy_(worker_values(rank))
    return model, engine


# ----------------------------------------------------------------------- laws of a round


def frozen(rank: int, world: int) -> Tensor:
    model, engine = start(rank)
    average_once(engine)
    engine.close()
    return model.values.detach().clone()


def test_frozen_parameters_are_equal_after_one_round(pool: Pool) -> None:
    mean = sum(worker_values(rank) for rank in range(4)) / 4
    for values in pool.run(frozen, world=4):
        torch.testing.assert_close(values, mean, rtol=0, atol=1e-14)


def moved_meanwhile(rank: int, world: int) -> Tensor:
    model, engine = start(rank)
    wait_until_due(engine)
    engine.make_round()
    model.values.data.add_(10.0 * (rank + 1))  # local steps while the snapshots are in transit
    engine.count_step()
    wait_until_due(engine)
    engine.make_round()
    assert engine.statistics.staleness == 1
    engine.close()
    return model.values.detach().clone()


def test_progress_made_meanwhile_survives_and_is_the_spread_after_a_round(pool: Pool) -> None:
    mean = sum(worker_values(rank) for rank in range(3)) / 3
    for rank, values in enumerate(pool.run(moved_meanwhile, world=3)):
        expected = mean + 10.0 * (rank + 1)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


def race(rank: int, world: int, topology: str | None, num_rounds: int) -> tuple[Tensor, int]:
    model, engine = start(rank, topology)
    steps = 0
    while engine.statistics.rounds < num_rounds:
        model.values.data.add_(1.0)
        steps += 1
        engine.step()
        time.sleep(1e-4)  # leave two cores to the communication threads
    engine.sync_point("the end of the race")
    engine.close()
    return model.values.detach().clone(), steps


@pytest.mark.soak
@pytest.mark.process
@every_topology
def test_no_update_is_lost_in_thousands_of_rounds(pool: Pool, topology: str | None) -> None:
    num_rounds = 2000
    results = pool.run(race, topology, num_rounds, world=3)
    steps = sum(steps for _, steps in results)
    start_sum = sum(worker_values(rank) for rank in range(3))
    total = sum(values for values, _ in results)
    torch.testing.assert_close(total, start_sum + steps, rtol=1e-11, atol=0)


def mix_with_neighbors(rank: int, world: int, topology: str) -> Tensor:
    model, engine = start(rank, topology)
    average_once(engine)
    engine.close()
    return model.values.detach().clone()


def test_neighbors_mix_with_the_rows_of_the_mixing_matrix(pool: Pool) -> None:
    from lightning_loco.topology import get_topology

    matrix = get_topology("ring").mixing_matrix(4)
    mixed = matrix @ torch.stack([worker_values(rank) for rank in range(4)])
    for rank, values in enumerate(pool.run(mix_with_neighbors, "ring", world=4)):
        torch.testing.assert_close(values, mixed[rank], rtol=0, atol=1e-13)


# ----------------------------------------------------------------------- no worker waits


def with_straggler(rank: int, world: int, topology: str | None) -> int:
    """Let worker 0 take its first step after all steps of the others; return the rounds by then."""
    model, engine = start(rank, topology)
    store = engine.worker.group.own_store("test")
    if rank == 0:
        wait_until(lambda: store.check(["done/1", "done/2"]))
    for _ in range(30 if rank else 3):
        model.values.data.add_(1.0)
        engine.step()
    rounds = engine.statistics.rounds
    store.set(f"done/{rank}", "")
    engine.finish()
    engine.close()
    return rounds


@every_topology
def test_a_straggler_slows_no_other_worker(pool: Pool, topology: str | None) -> None:
    _, *fast = pool.run(with_straggler, topology, world=3)
    if topology != "random_matching":  # it pairs the straggler with other workers
        assert fast == [0, 0]


def uneven(rank: int, world: int, topology: str | None) -> tuple[Tensor, int]:
    """Let the last worker continue, without changing its values, until it has seen some rounds."""
    model, engine = start(rank, topology)
    moves = 10 + 40 * rank
    while moves > 0 or (rank == world - 1 and engine.statistics.rounds < 4):
        model.values.data.add_(float(moves > 0))
        engine.step()
        time.sleep(0.001)
        moves -= 1
    engine.finish()
    engine.close()
    return model.values.detach().clone(), engine.statistics.rounds


@every_topology
def test_who_finishes_early_takes_part_until_all_have_finished(
    pool: Pool, topology: str | None
) -> None:
    results = pool.run(uneven, topology, world=3)
    assert results[0][1] > 3
    mean = sum(worker_values(rank) + 10 + 40 * rank for rank in range(3)) / 3
    for values, rounds in results:
        assert rounds == results[0][1]
        torch.testing.assert_close(values, mean, rtol=0, atol=1e-10)
        assert torch.equal(values, results[0][0])


# ------------------------------------------------------------------------- abort and resume


def abort_and_resume(rank: int, world: int) -> list[int]:
    model, engine = start(rank)
    rounds = []
    for phase in range(3):
        for _ in range(20 + 5 * rank):
            model.values.data.add_(1.0)
            engine.step()
        engine.abort()
        engine.abort()
        rounds.append(engine.statistics.rounds)
        for _ in range(20):
            assert not engine.step(), phase
        engine.resume()
        engine.resume()
    average_once(engine)
    rounds.append(engine.statistics.rounds)
    engine.finish()
    engine.close()
    return rounds


def test_abort_and_resume_twice_each(pool: Pool) -> None:
    first, *others = pool.run(abort_and_resume, world=3)
    assert others == [first] * 2
    assert first[0] > 0
    assert first[3] > first[2]


def stop_on_request(rank: int, world: int, kind: str) -> tuple[str | None, float]:
    model = Numbers(torch.zeros(10))
    engine = ClockEngine(model, interval_s=0.01) if kind == "clock" else PairwiseEngine(model)
    requested = time.monotonic()
    for step in range(100000):
        if kind == "pairwise":
            engine.update_send(1.0)
        time.sleep(0.2 if rank == 0 else 0.002)
        engine.step()
        if rank == 1 and step == 20:
            requested = time.monotonic()
            engine.worker.stop.request("SIGTERM")
        if engine.worker.stop_agreed is not None:
            break
    seconds = time.monotonic() - requested
    engine.sync_point("the checkpoint after the stop")
    reason = engine.worker.stop_agreed
    engine.close()
    return reason, seconds


@pytest.mark.parametrize("kind", ["clock", "pairwise"])
def test_a_stop_is_agreed_soon_however_fast_the_workers_are(pool: Pool, kind: str) -> None:
    for reason, seconds in pool.run(stop_on_request, kind, world=3):
        assert reason == "SIGTERM"
        assert seconds < SOON_S


# ------------------------------------------------------------------------- warm-up


def warm_up(rank: int, world: int, num_steps: int) -> Tensor:
    model = make_model()
    engine = ClockEngine(model, interval_s=0, warmup_steps=num_steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(num_steps):
        assert engine.is_warming_up
        optimizer.zero_grad()
        loss_of(model, worker_batch(rank, step)).backward()
        engine.average_gradients(model.parameters())
        optimizer.step()
        engine.step()
    assert not engine.is_warming_up
    assert engine.statistics.rounds == 0
    result = flat(model)
    engine.close()
    return result


def data_parallel(rank: int, world: int, num_steps: int) -> Tensor:
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(num_steps):
        train_step(model, optimizer, worker_batch(rank, step))
    return flat(model.module)


def test_warm_up_steps_are_steps_of_ddp(pool: Pool) -> None:
    expected = pool.run(data_parallel, 7, world=3)[0]
    for result in pool.run(warm_up, 7, world=3):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def missing_gradients(rank: int, world: int) -> list[Tensor | None]:
    engine = ClockEngine(make_model())
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), float(rank))
    if rank == 1:
        parameters[1].grad = torch.ones(2)
    engine.average_gradients(parameters)
    engine.close()
    return [p.grad for p in parameters]


def test_a_gradient_that_is_missing_on_some_workers_counts_as_zero(pool: Pool) -> None:
    for first, second, third in pool.run(missing_gradients, world=2):
        assert first.tolist() == [0.5, 0.5]
        assert second.tolist() == [0.5, 0.5]
        assert third is None


# ------------------------------------------------------------------------- faults


def broken_worker(rank: int, world: int) -> tuple[Tensor, bool]:
    model, engine = start(rank)
    if rank == 1:
        model.values.data[3] = math.nan
    average_once(engine)
    engine.close()
    return model.values.detach().clone(), engine.worker.was_finite


@pytest.mark.filterwarnings("ignore:.*NaN")
def test_a_worker_with_nan_takes_over_the_mean_of_the_others(pool: Pool) -> None:
    mean = (worker_values(0) + worker_values(2)) / 2
    results = pool.run(broken_worker, world=3)
    assert [finite for _, finite in results] == [True, False, True]
    for values, _ in results:
        torch.testing.assert_close(values, mean, rtol=0, atol=1e-14)


def one_dies(rank: int, world: int, topology: str | None) -> None:
    model, engine = start(rank, topology)
    try:
        for step in range(100000):
            model.values.data.add_(1.0)
            engine.step()
            time.sleep(0.001)
            if rank == 2 and step == 20:
                raise OSError("the disk of worker 2 is full")
            engine.worker.group.watchdog.raise_if_failed()
    except OSError as error:
        engine.worker.group.watchdog.report(str(error))
        raise
    finally:
        engine.close()


@pytest.mark.recovery
@every_topology
def test_a_failure_of_one_worker_ends_all_with_its_reason(pool: Pool, topology: str | None) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(one_dies, topology, world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    assert str(caught.value).count("the disk of worker 2 is full") >= 2


# ------------------------------------------------------------------------- metrics, alone, input


def measured(rank: int, world: int) -> tuple[float | None, float]:
    model, engine = start(rank)
    engine.measure_outer_gradient = True
    average_once(engine)
    distance = engine.statistics.outer_grad_norm
    average_once(engine)
    engine.close()
    assert distance is not None
    return engine.statistics.consensus_distance, distance


def test_the_consensus_distance_travels_with_the_next_round(pool: Pool) -> None:
    values = torch.stack([worker_values(rank) for rank in range(3)])
    away = (values - values.mean(0)).norm(dim=1)
    expected = float(away.square().mean().sqrt())
    for rank, (consensus, own) in enumerate(pool.run(measured, world=3)):
        assert own == pytest.approx(float(away[rank]), rel=1e-6)
        assert consensus == pytest.approx(expected, rel=1e-6)


def test_one_worker_alone_is_left_as_it_is() -> None:
    model = make_model()
    before = flat(model)
    engine = ClockEngine(model, interval_s=0)
    for _ in range(6):
        engine.step()
    engine.finish()
    engine.close()
    torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-15)
    assert not [t for t in threading.enumerate() if t.name.startswith("loco")]


def test_the_interval_is_kept() -> None:
    engine = ClockEngine(make_model(), interval_s=30)
    assert [engine.step() for _ in range(5)] == [True, True, False, False, False]
    assert engine.statistics.rounds == 1
    engine.close()


def test_bad_settings_are_refused(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"interval_s": -1}, ValueError, "interval_s must be at least 0"),
        ({"interval_s": math.inf}, ValueError, "interval_s"),
        ({"interval_s": "0.5"}, TypeError, "interval_s must be a number"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps"),
        ({"topology": "square"}, ValueError, "square"),
    ]
    for settings, error, text in rows:
        with subtests.test(str(settings)), pytest.raises(error, match=text):
            ClockEngine(make_model(), **settings)


def state_comes_back(rank: int, world: int) -> bool:
    model, engine = start(rank)
    for _ in range(10 + rank):
        model.values.data.add_(1.0)
        engine.step()
    engine.sync_point("checkpoint")
    saved = engine.state_dict()
    values = model.values.detach().clone()
    engine.close()
    model, engine = start(rank)
    engine.load_state_dict(saved)
    same = torch.equal(model.values, values) and engine.worker.steps == 10 + rank
    average_once(engine)
    engine.close()
    return same


def test_a_state_goes_on_where_it_was(pool: Pool) -> None:
    assert pool.run(state_comes_back, world=2) == [True, True]
