"""Rounds that go on from another run's state, without a Trainer; see also test_other_numbers.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC
from lightning_loco.earlier_run import EarlierRun
from lightning_loco.engine import Engine, RoundSettings, resume_from
from lightning_loco.schedules import EverySteps
from tests.conftest import cover
from tests.engine.toys import (
    SMALL_BUCKET,
    Counting,
    Halves,
    SendingScalars,
    approach,
    flat,
    rounding,
    saved_and_loaded,
    zeros,
)
from tests.pool import Pool

STEPS = 7
State = dict[str, Any]


def settings_of(algorithm: Algorithm, schedule: EverySteps, **others: Any) -> RoundSettings:
    return RoundSettings(algorithm, schedule, bucket_bytes=SMALL_BUCKET, **others)


def write(rank: int, world: int, settings: RoundSettings) -> tuple[State, State]:
    """A worker's state, and the settings."""
    model = zeros()
    engine = Engine.from_settings(model, settings)
    for _ in range(STEPS):
        approach(rank, model)
        engine.step()
    engine.sync_point("a checkpoint")
    state = saved_and_loaded(engine.state_dict())
    described = engine.settings.describe()
    engine.close()
    return state, described


def go_on(
    rank: int, world: int, settings: RoundSettings, states: list[State], described: State
) -> tuple[list[str], State, bool]:
    """What is dropped, the state that is taken over, and whether training goes on well."""
    algorithm = settings.algorithm
    saved = EarlierRun(
        states[rank if rank < len(states) else 0],
        described["algorithm"],
        described,
        len(states),
        algorithm.consensus_key,
        algorithm.replicated,
        read=lambda worker: states[worker],
    )
    model = zeros()
    engine = Engine.from_settings(model, settings)
    with torch.no_grad():  # the consensus of the main file
        outer = states[0]["shared"][0]["state"].get("outer")
        mean = torch.stack([state["params"] for state in states]).mean(0)
        model.value.copy_(mean if outer is None else outer)
    notes = resume_from(engine, saved)
    taken = saved_and_loaded(engine.state_dict())
    for _ in range(3):
        approach(rank, model)
        engine.step()
    engine.finish()
    engine.close()
    return notes, taken, bool(torch.isfinite(flat(model)).all())


def resumed_from(
    pool: Pool, before: RoundSettings, now: RoundSettings, numbers: tuple[int, int]
) -> tuple[list[State], list[tuple[list[str], State]]]:
    written = pool.run(write, before, world=numbers[0])
    states = [state for state, _ in written]
    found = pool.run(go_on, now, states, written[0][1], world=numbers[1])
    assert all(finite for *_, finite in found)
    return states, [(notes, state) for notes, state, _ in found]


LATE = EverySteps(2, overlap=True)


@pytest.mark.parametrize(
    ("schedule", "whole", "numbers"),
    cover(
        [
            pytest.param(EverySteps(2), False, id="at once"),
            pytest.param(EverySteps(2), True, id="at once, whole"),
            pytest.param(LATE, False, id="late"),
            pytest.param(LATE, True, id="late, whole"),
            pytest.param(Halves(2), False, id="halves"),
            pytest.param(Halves(2, overlap=True), False, id="late halves"),
        ],
        [(3, 2), (2, 4)],
        strength=1,
    ),
)
def test_counters_and_shared_vectors_are_exact(
    pool: Pool, schedule: EverySteps, whole: bool, numbers: tuple[int, int]
) -> None:
    settings = settings_of(Counting(whole), schedule)
    states, found = resumed_from(pool, settings, settings, numbers)
    text = f"all workers begin at the mean of the {numbers[0]} workers' parameters"
    mean = torch.stack([state["params"] for state in states]).mean(0)
    for notes, taken in found:
        assert notes == [text]
        torch.testing.assert_close(taken["params"], mean, rtol=0, atol=1e-14)
        for one, other in zip(states[0]["shared"], taken["shared"], strict=True):
            state, again = one["state"], other["state"]
            assert state.keys() == again.keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[name]))
            kept, received = one["received"], other["received"]
            assert (kept is None) == (received is None)
            assert kept is None or torch.equal(kept, received)


def halved(round_index: int) -> float:
    """An outer learning rate."""
    return 0.5**round_index


def test_a_setting_that_was_described_in_other_words_changes_nothing(pool: Pool) -> None:
    settings = settings_of(DiLoCo(outer_lr=halved), EverySteps(2))
    written = pool.run(write, settings, world=2)
    states, described = [state for state, _ in written], written[0][1]
    assert described["outer_lr"].endswith(".halved")
    described["outer_lr"] = ["<lambda>", "97007c00", ["halved"], [], None, []]
    found = pool.run(go_on, settings, states, described, world=2)
    for (notes, taken, _), state in zip(found, states, strict=True):
        assert notes == []
        assert torch.equal(taken["params"], state["params"])
        for name in ("shared", "fragments", "began_at"):
            torch.testing.assert_close(taken[name], state[name], rtol=0, atol=0, msg=name)


def test_what_compression_had_left_over_becomes_the_mean(pool: Pool) -> None:
    settings = settings_of(DiLoCo(), EverySteps(2), compression=rounding(DiLoCo()))
    states, found = resumed_from(pool, settings, settings, (3, 2))
    left = torch.stack([state["fragments"][0]["residual"]["residual"] for state in states])
    assert left.abs().max() > 0
    for _, taken in found:
        residual = taken["fragments"][0]["residual"]["residual"]
        torch.testing.assert_close(residual, left.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (LATE, Halves(2, overlap=True)),
        (Halves(2, overlap=True), LATE),
        (Halves(2, overlap=True), EverySteps(2)),
    ],
)
def test_a_pending_round_of_other_parts_is_dropped(
    pool: Pool, before: EverySteps, now: EverySteps
) -> None:
    algorithm = DiLoCo(0.7, 0.3)
    states, found = resumed_from(
        pool, settings_of(algorithm, before), settings_of(algorithm, now), (2, 2)
    )
    for notes, taken in found:
        assert notes == ["a pending round is dropped, because other parts are exchanged"]
        for shared in taken["shared"]:
            for name in ("outer", "momentum"):
                assert torch.equal(shared["state"][name], states[0]["shared"][0]["state"][name])


def test_a_compression_that_is_no_more_is_named(pool: Pool) -> None:
    with_codec = settings_of(DiLoCo(), EverySteps(2), compression=rounding(DiLoCo()))
    plain = dataclasses.replace(with_codec, compression=None)
    _, found = resumed_from(pool, with_codec, plain, (2, 2))
    assert [notes for notes, _ in found] == [["what compression had left over is dropped"]] * 2
    _, found = resumed_from(pool, plain, with_codec, (2, 2))
    assert [notes for notes, _ in found] == [[], []]


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    cover(
        [Counting(), DiLoCo(0.7, 0.3), SendingScalars(), GASLoC()],
        [EverySteps(2), Halves(2)],
        strength=1,
    ),
)
def test_a_pending_round_is_applied_where_none_may_be_pending(
    pool: Pool, algorithm: Algorithm, schedule: EverySteps
) -> None:
    late = dataclasses.replace(schedule, overlap=True)
    before, now = settings_of(algorithm, late), settings_of(algorithm, schedule)
    states, found = resumed_from(pool, before, now, (2, 2))
    for own, (notes, taken) in zip(states, found, strict=True):
        assert notes == ["a pending round is applied at once"]
        assert all(fragment["pending"] is None for fragment in taken["fragments"])
        assert not torch.equal(taken["params"], own["params"])
    for name, value in states[0]["shared"][0]["state"].items():
        if isinstance(value, int):  # rounds that were made and received
            assert found[0][1]["shared"][0]["state"][name] == value + 1
