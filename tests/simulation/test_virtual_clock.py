"""Simulated time: workers of different speeds run the rounds of a hand-written event loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, Simulation
from lightning_loco.algorithms import Algorithm, ModelAverage, NeighborAverage
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EveryInterval, EverySteps
from tests.harness.rounds import approach as local_step
from tests.harness.rounds import zeros
from tests.harness.toys import Point, assert_close, randn

SPEEDS = (10.03, 4.13, 2.37)  # local steps per second, whose steps never end at the same time
TARGETS = randn(3, 4)
RATE = 0.05


def approach(models: list[Point], worker: int) -> None:
    value = models[worker].value.data
    value.add_(TARGETS[worker] - value, alpha=RATE)


@dataclasses.dataclass
class Worker:
    """One worker of the hand-written event loop."""

    params: Tensor
    snapshot: Tensor | None = None
    rounds: int = 0
    steps: int = 0
    applied_at: float = float("-inf")


def average_by_hand(seconds: float, interval_s: float) -> list[Worker]:
    """Run asynchronous averaging as a plain event loop over the ends of local steps.

    After a local step, a worker applies the mean if all snapshots of its round have arrived, or
    sends a snapshot if it has no pending round and its pause is over.
    """
    workers = [Worker(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
    sent: list[dict[int, Tensor]] = []
    events = sorted(
        (number / speed, index)
        for index, speed in enumerate(SPEEDS)
        for number in range(1, int(seconds * speed) + 1)
    )
    for now, index in events:
        own = workers[index]
        own.params = own.params + RATE * (TARGETS[index] - own.params)
        own.steps += 1
        if own.snapshot is None:
            if now - own.applied_at >= interval_s:
                while len(sent) <= own.rounds:
                    sent.append({})
                own.snapshot = sent[own.rounds][index] = own.params
                own.rounds += 1
        elif len(sent[own.rounds - 1]) == len(SPEEDS):
            mean = torch.stack([sent[own.rounds - 1][w] for w in range(len(SPEEDS))]).mean(0)
            own.params = mean + (own.params - own.snapshot)
            own.snapshot, own.applied_at = None, now
    return workers


@pytest.mark.parametrize("interval_s", [0.0, 0.33, 0.97])
def test_async_averaging_with_three_speeds_is_a_plain_event_loop(interval_s: float) -> None:
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
    settings = RoundSettings(ModelAverage(), EveryInterval(interval_s))
    simulation = Simulation.from_settings(models, settings, speeds=SPEEDS)
    simulation.run(lambda worker: approach(models, worker), seconds=20.05)
    expected = average_by_hand(20.05, interval_s)
    for engine, own in zip(simulation.participants, expected, strict=True):
        assert engine.worker.steps == own.steps
        assert engine.worker.round_index == own.rounds
    for params, own in zip(simulation.params(), expected, strict=True):
        assert_close(params, own.params)
    assert len({own.steps for own in expected}) == 3
    assert min(own.rounds for own in expected) > 5


@pytest.mark.parametrize("interval_s", [0.0, 0.5])
def test_a_run_in_pieces_is_the_same(interval_s: float) -> None:
    results = []
    for pieces in ([6.05], [2.05, 1.5, 2.5]):
        models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
        settings = RoundSettings(NeighborAverage(), EveryInterval(interval_s), topology="ring")
        simulation = Simulation.from_settings(models, settings, speeds=SPEEDS)
        for seconds in pieces:
            simulation.run(lambda worker: approach(models, worker), seconds=seconds)  # noqa: B023
        results.append(torch.stack(simulation.params()))
    assert_close(results[0], results[1])


def test_a_blocking_round_waits_for_the_slowest() -> None:
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
    simulation = Simulation(models, LocalSGD(), sync_every=5, speeds=SPEEDS)
    simulation.run(lambda worker: approach(models, worker), num_rounds=4)
    assert simulation.time_s == pytest.approx([4 * 5 / SPEEDS[2]] * 3)
    assert [engine.worker.steps for engine in simulation.participants] == [20] * 3


def test_an_overlapped_round_lets_the_fast_ones_go_ahead_by_one() -> None:
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
    simulation = Simulation(
        models, DiLoCo(0.7, 0.0), sync_every=5, overlap=True, warm_start=False, speeds=SPEEDS
    )
    simulation.run(lambda worker: approach(models, worker), num_rounds=4)
    slowest = 5 / SPEEDS[2]
    # A result of round 2 is needed to begin round 3, and the slowest has sent it at 3 * slowest.
    assert simulation.time_s == pytest.approx([3 * slowest, 3 * slowest, 4 * slowest])


def test_gossip_waits_for_neighbours_only() -> None:
    """On a line 0 - 1 - 2 - 3 with a slow end, the first round delays only the end's neighbour."""
    line = [
        [2 / 3, 1 / 3, 0, 0],
        [1 / 3, 1 / 3, 1 / 3, 0],
        [0, 1 / 3, 1 / 3, 1 / 3],
        [0, 0, 1 / 3, 2 / 3],
    ]
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in range(4)]
    settings = RoundSettings(GASLoC(1.0, 1.0, 0.0), EverySteps(1), topology=line)
    simulation = Simulation.from_settings(models, settings, speeds=(1.0, 1.0, 1.0, 0.1))
    simulation.run(lambda worker: None, num_rounds=1)
    assert simulation.time_s == pytest.approx([1.0, 1.0, 10.0, 10.0])


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(), DiLoCo(), GASLoC()], ids=lambda a: type(a).__name__
)
def test_speeds_do_not_change_the_numbers_of_rounds_by_steps(algorithm: Any) -> None:
    results = []
    for speeds in (None, SPEEDS, (1.0, 50.0, 3.0)):
        models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in SPEEDS]
        simulation = Simulation(models, algorithm, sync_every=[3, 2, 4], speeds=speeds)
        simulation.run(lambda worker: approach(models, worker), num_rounds=6)  # noqa: B023
        results.append(torch.stack(simulation.params()))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_worker_with_nan_is_left_out_as_in_a_real_run() -> None:
    models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in range(3)]
    simulation = Simulation(models, DiLoCo(1.0, 0.0), sync_every=1)

    def local_step(worker: int) -> None:
        models[worker].value.data.add_(float("nan") if worker == 1 else worker + 1.0)

    simulation.run(local_step, 1)
    for params in simulation.params():
        assert_close(params, torch.full((4,), 2.0, dtype=torch.float64))  # the mean of 1 and 3


def test_bad_arguments_are_refused() -> None:
    models = [Point(torch.zeros(2)) for _ in range(2)]
    for speeds in ((1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="speeds are the local steps per second of each"):
            Simulation(models, LocalSGD(), speeds=speeds)
    by_time = RoundSettings(ModelAverage(), EveryInterval(0.5))
    with pytest.raises(ValueError, match="needs to know how long local steps take. Give speeds"):
        Simulation.from_settings(models, by_time)
    simulation = Simulation(models, LocalSGD())
    with pytest.raises(ValueError, match="Give num_rounds or seconds, and not both"):
        simulation.run(lambda worker: None)
    with pytest.raises(ValueError, match="take no time without speeds"):
        simulation.run(lambda worker: None, seconds=1.0)


def test_a_run_round_by_round_is_the_same_for_workers_of_different_speed() -> None:
    """A fast worker stops before the slow ones have started the round that it waits for next."""
    results = []
    for pieces in ([6], [1] * 6, [2, 3, 1]):
        models = [Point(torch.zeros(4, dtype=torch.float64)) for _ in range(4)]
        simulation = Simulation(
            models, GASLoC(), sync_every=2, topology="xor", speeds=(*SPEEDS, 8.0), links="wan"
        )
        for rounds in pieces:
            simulation.run(
                lambda w: models[w].value.data.add_(randn(4, seed=w) - models[w].value, alpha=RATE),  # noqa: B023
                rounds,
            )
        results.append((torch.stack(simulation.params()), simulation.time_s))
        assert simulation.round_index == 6
    assert all(torch.equal(params, results[0][0]) for params, _ in results)
    assert all(time_s == results[0][1] for _, time_s in results)


@pytest.mark.parametrize("algorithm", [DiLoCo(), GASLoC(), GASLoC(momentum=0.0)], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
def test_drain_ends_the_rounds_in_which_workers_waited(algorithm: Algorithm, overlap: bool) -> None:
    """After a run by time some workers are in the middle of a round that others have not begun."""
    models = [zeros() for _ in range(4)]
    settings: dict[str, Any] = {"overlap": overlap, "warm_start": False, "links": "wan"}
    if isinstance(algorithm, DiLoCo) and overlap:
        algorithm = DiLoCo(0.7, 0.0)
    simulation = Simulation(
        models, algorithm, sync_every=5, speeds=[10.0, 7.0, 5.0, 3.0], jitter=0.1, **settings
    )
    for seconds in (3.0, 2.0, 4.5):
        simulation.run(lambda worker: local_step(worker, models[worker]), seconds=seconds)
        simulation.drain()
        engines = simulation.participants
        assert len({engine.worker.round_index for engine in engines}) == 1
        assert all(part.pending is None for engine in engines for part in engine.fragments)
        assert all(engine.state_dict() for engine in engines)
