"""Virtual time on links: closed forms, costs without training, unchanged numbers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, NoLoCo, Simulation
from lightning_loco.algorithms import Algorithm, KeepProgress, ModelAverage
from lightning_loco.costs import Link, Links, LinkTimes, as_links
from lightning_loco.costs.method_costs import ENCODINGS, Method, StepTimes, estimate
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import (
    EveryInterval,
    EverySteps,
    Schedule,
    VaryingSteps,
    hidden_rounds,
    streaming_rounds,
)
from lightning_loco.simulation.timeline import TimelineEvent
from tests.harness.toys import Point, randn

NUMEL = 1000
BYTES = 4 * NUMEL
SPEEDS = (10.0, 4.0, 2.5, 5.0)
SLOW = Link(0.032, 0.5)
"""A kilobyte takes a quarter of a second."""

UNEQUAL = {
    "default": {"mbit_per_s": 0.1, "latency_s": 0.03, "jitter_s": 0.02},
    "workers": {2: {"mbit_per_s": 0.02, "latency_s": 0.1, "jitter_s": 0.1}},
    "pairs": {"0-1": {"mbit_per_s": 0.5}, "1->3": {"mbit_per_s": 0.01}},
    "seed": 3,
}


def points(num_workers: int = 4, dtype: torch.dtype = torch.float32) -> list[Point]:
    return [Point(torch.zeros(NUMEL, dtype=dtype)) for _ in range(num_workers)]


def approach(models: list[Point], worker: int) -> None:
    target = randn(len(models), NUMEL, seed=9)[worker].to(models[worker].value.dtype)
    models[worker].value.data.lerp_(target, 0.1)


def simulate(settings: RoundSettings, num_rounds: int, **others: Any) -> Simulation:
    models = points()
    simulation = Simulation.from_settings(models, settings, **others)
    simulation.run(lambda worker: approach(models, worker), num_rounds)
    return simulation


# ----------------------------------------------------------------------- closed forms


def test_a_blocking_mean_on_unequal_links_takes_as_long_as_the_slowest() -> None:
    links = [Link(0.1, 0.01), Link(0.02, 0.3), Link(0.05, 0.02), Link(1, 0.0)]
    simulation = simulate(RoundSettings(LocalSGD(), EverySteps(5)), 3, speeds=SPEEDS, links=links)
    exchange_s = 1.5 * BYTES * 8 / 0.02e6 + 6 * 0.3
    assert simulation.time_s == pytest.approx([3 * (5 / 2.5 + exchange_s)] * 4)
    for costs, speed in zip(simulation.costs, SPEEDS, strict=True):
        assert costs.steps == 15
        assert costs.rounds == 3
        assert costs.bytes_sent == 3 * 1.5 * BYTES
        assert costs.compute_s == pytest.approx(15 / speed)
        assert costs.compute_s + costs.wait_s == pytest.approx(costs.time_s)
        assert costs.utilisation == pytest.approx(costs.compute_s / simulation.time_s[0])


def test_a_star_is_as_fast_as_its_center_can_send() -> None:
    """The center sends to three workers over one link; each of them sends one message."""
    settings = RoundSettings(GASLoC(1.0, 1.0, 0.0), EverySteps(1), topology="star")
    simulation = simulate(settings, 1, speeds=[1.0] * 4, links=SLOW)
    assert simulation.time_s == pytest.approx([1 + 3 * 1.0 + 0.5] * 4)
    assert [costs.bytes_sent for costs in simulation.costs] == [3 * BYTES, *[BYTES] * 3]


def test_a_pair_waits_only_for_each_other() -> None:
    """Workers 0 and 1 have a slow link; of workers 2 and 3, worker 3 computes slowly."""
    settings = RoundSettings(NoLoCo(), EverySteps(1), topology="xor")
    links = Links(Link(1e9), pairs=((0, 1, SLOW), (1, 0, SLOW)))
    simulation = simulate(settings, 1, speeds=[1.0, 1.0, 1.0, 0.5], links=links)
    assert simulation.time_s == pytest.approx([1 + 1.5, 1 + 1.5, 2.0, 2.0], abs=1e-3)


def test_messages_of_fragments_follow_each_other_on_a_link() -> None:
    """Four fragments, one after each step of 0.1 s; each one occupies the link for 0.5 s."""
    schedule = hidden_rounds(4, fragments=4, delay=4)
    settings = RoundSettings(DiLoCo(), schedule, merge_policy=KeepProgress())
    link = Link(1.5 * BYTES / 4 * 8 / 0.5 / 1e6)
    simulation = simulate(settings, 4, speeds=[10.0] * 4, links=link)
    sent = [event for event in simulation.timeline if event.kind == "send" and event.worker == 0]
    assert [event.start_s for event in sent] == pytest.approx([0.1, 0.6, 1.1, 1.6])
    assert [event.end_s for event in sent] == pytest.approx([0.6, 1.1, 1.6, 2.1])
    assert simulation.time_s == pytest.approx([0.4] * 4)


def test_an_overlapped_round_is_hidden_if_computing_takes_longer() -> None:
    settings = RoundSettings(DiLoCo(0.7, 0.0), EverySteps(5, overlap=True, warm_start=False))
    exchange_s = 1.5 * BYTES * 8 / 0.032e6 + 6 * 0.5
    for speed, round_s in ((1.0, 5.0), (100.0, exchange_s)):
        simulation = simulate(settings, 6, speeds=[speed] * 4, links=SLOW)
        assert simulation.time_s == pytest.approx([5 / speed + 5 * round_s] * 4)


def test_averaging_by_the_clock_ends_when_the_result_has_arrived() -> None:
    models = points()
    settings = RoundSettings(ModelAverage(), EveryInterval(1.0))
    simulation = Simulation.from_settings(models, settings, speeds=[10.0] * 4, links=SLOW)
    simulation.run(lambda worker: approach(models, worker), seconds=20.05)
    exchange_s = 1.5 * BYTES * 8 / 0.032e6 + 6 * 0.5  # 4.5 s, and a pause of 1 s
    assert simulation.round_index == 1 + int(19.9 / (exchange_s + 1.0))
    assert simulation.steps == [200] * 4
    assert [costs.utilisation for costs in simulation.costs] == pytest.approx([1.0] * 4)


# ------------------------------------------------- the same as the costs without training


SCHEDULES: dict[str, Schedule] = {
    "blocking": EverySteps(4),
    "varying": VaryingSteps({0: 1, 4: 3}),
    "overlapped": EverySteps(4, overlap=True, warm_start=False),
    "warm start": EverySteps(2, overlap=True),
    "hidden": hidden_rounds(4),
    "streaming": dataclasses.replace(streaming_rounds(6), pattern="even"),
    "late": hidden_rounds(4, fragments=4, delay=4),
}


def exchanges() -> list[tuple[str, Algorithm, Any, str | None]]:
    """Return kind, algorithm, topology and compression."""
    return [
        ("mean", DiLoCo(0.7, 0.0), None, None),
        ("mean", DiLoCo(0.7, 0.0), None, "int8"),
        ("mean", DiLoCo(0.7, 0.0), None, "sparse"),
        ("gather", DiLoCo(0.7, 0.0, aggregate="geometric_median"), None, None),
        ("neighbors", GASLoC(), "ring", None),
        ("neighbors", GASLoC(), "random_matching", "bf16"),
        ("neighbors", GASLoC(), "star", None),
    ]


def test_times_and_bytes_are_those_of_the_costs_without_training(
    subtests: pytest.Subtests,
) -> None:
    """Exactly, for all kinds of exchanges, schedules, links, speeds and jitter."""
    networks: tuple[Any, ...] = (
        "wan",
        UNEQUAL,
        {"default": "lan", "sites": 2, "between_sites": SLOW.__dict__},
    )
    for (name, schedule), (kind, algorithm, topology, codec), links in itertools.product(
        SCHEDULES.items(), exchanges(), networks
    ):
        is_late = schedule.is_overlapped(99)
        if is_late and (kind == "gather" or (kind == "neighbors" and schedule.num_fragments > 1)):
            continue
        with subtests.test(name, kind=kind, topology=topology, codec=codec, links=links):
            policy = KeepProgress() if is_late and schedule.num_fragments > 1 else None
            settings = RoundSettings(algorithm, schedule, topology, codec, policy)
            simulation = simulate(settings, 7, speeds=SPEEDS, jitter=0.3, links=links, seed=5)
            method = Method(
                schedule,
                kind,  # type: ignore[arg-type]
                simulation.settings.topology,
                ENCODINGS[codec or "none"],
            )
            found = as_links(links)
            assert found is not None
            costs = estimate(
                method,
                NUMEL,
                StepTimes([1 / speed for speed in SPEEDS], 0.3, 5),
                LinkTimes(found, 4),
                num_rounds=7,
            )
            assert simulation.time_s == costs.time_s.tolist()
            own = simulation.costs
            assert [one.bytes_sent for one in own] == costs.bytes_sent.tolist()
            assert [one.compute_s for one in own] == pytest.approx(costs.compute_s.tolist())
            assert {one.rounds for one in own} == {costs.rounds}
            assert {one.steps for one in own} == {costs.steps}


# ------------------------------------------------------------------ numbers do not change


def test_links_and_speeds_do_not_change_numbers(subtests: pytest.Subtests) -> None:
    for (name, schedule), (kind, algorithm, topology, codec) in itertools.product(
        SCHEDULES.items(), exchanges()
    ):
        is_late = schedule.is_overlapped(99)
        if is_late and (kind == "gather" or (kind == "neighbors" and schedule.num_fragments > 1)):
            continue
        with subtests.test(name, kind=kind, topology=topology, codec=codec):
            policy = KeepProgress() if is_late and schedule.num_fragments > 1 else None
            settings = RoundSettings(algorithm, schedule, topology, codec, policy)
            plain, timed = (
                torch.stack(simulate(settings, 5, **others).params())
                for others in ({}, {"speeds": SPEEDS, "jitter": 0.5, "links": UNEQUAL})
            )
            assert torch.equal(plain, timed)


def test_links_of_the_settings_are_those_of_the_simulation() -> None:
    settings = RoundSettings(LocalSGD(), EverySteps(5))
    with_link = dataclasses.replace(settings, link=Links(SLOW))
    times = [
        simulate(with_link, 2, speeds=SPEEDS),
        simulate(settings, 2, speeds=SPEEDS, links=SLOW),
    ]
    assert times[0].time_s == times[1].time_s


def test_a_simulation_is_the_same_for_the_same_seed() -> None:
    def events(seed: int) -> list[TimelineEvent]:
        settings = RoundSettings(GASLoC(), EverySteps(3), topology="ring")
        return simulate(settings, 5, speeds=SPEEDS, jitter=0.2, links=UNEQUAL, seed=seed).timeline

    assert events(0) == events(0)
    assert events(0) != events(1)


# --------------------------------------------------------------------- recorded values


def test_the_timeline_of_a_worker_has_no_gaps_and_its_losses_have_times() -> None:
    models = points()

    def local_step(worker: int) -> Tensor:
        approach(models, worker)
        return models[worker].value.detach().square().mean()

    simulation = Simulation(models, LocalSGD(), sync_every=5, speeds=SPEEDS, links=SLOW)
    simulation.run(local_step, num_rounds=2)
    for worker in range(4):
        own = [e for e in simulation.timeline if e.worker == worker and e.kind != "send"]
        assert [event.kind for event in own] == ["compute", "wait"] * 2
        ends = [0.0, *(event.end_s for event in own)]
        assert [event.start_s for event in own] == ends[:-1]
        assert ends[-1] == simulation.time_s[worker]
        losses = [point for point in simulation.losses if point.worker == worker]
        assert [point.step for point in losses] == list(range(1, 11))
        assert losses[4].time_s == pytest.approx(5 / SPEEDS[worker])
    assert [p.time_s for p in simulation.losses] == sorted(p.time_s for p in simulation.losses)
    assert simulation.losses[-1].loss > 0


def test_a_run_in_pieces_waits_for_messages_on_their_way() -> None:
    results = []
    for pieces in ([30.0], [7.0, 0.2, 15.0, 7.8]):
        models = points(dtype=torch.float64)
        simulation = Simulation(models, LocalSGD(), sync_every=5, speeds=SPEEDS, links=SLOW)
        for seconds in pieces:
            simulation.run(lambda worker: approach(models, worker), seconds=seconds)  # noqa: B023
        results.append((torch.stack(simulation.params()), simulation.steps, simulation.time_s))
    assert results[0][1:] == results[1][1:]
    assert torch.equal(results[0][0], results[1][0])
