"""Rounds resume from the state of another run, without a Trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, DiLoCo, EagerDiLoCo, GASLoC
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.model.worker import EarlierRun
from lightning_loco.schedules import EverySteps
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.rounds import (
    SMALL_BUCKET,
    Counting,
    Halves,
    SendingScalars,
    approach,
    rounding,
    saved_and_loaded,
    zeros,
)
from tests.harness.small_model import flat

STEPS = 7
State = dict[str, Any]


def settings_of(algorithm: Algorithm, schedule: EverySteps, **others: Any) -> RoundSettings:
    return RoundSettings(algorithm, schedule, bucket_bytes=SMALL_BUCKET, **others)


def write(rank: int, world: int, settings: RoundSettings) -> tuple[State, State]:
    """Return a worker's state, and the settings."""
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


def mean_of(states: list[State]) -> Tensor:
    """Return the consensus of the workers that saved these states."""
    return torch.stack([state["params"] for state in states]).mean(0)


def go_on(
    rank: int, world: int, settings: RoundSettings, states: list[State], described: State
) -> tuple[list[str], State, bool]:
    """Return the notes, the restored state, and whether training continues."""
    saved = EarlierRun(
        states[rank if rank < len(states) else 0],
        described["algorithm"],
        described,
        has_same_workers=len(states) == world,
    )
    model = zeros()
    engine = Engine.from_settings(model, settings)
    with torch.no_grad():
        model.value.copy_(mean_of(states))  # the consensus of the main file
    notes = engine.resume_from(saved)
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
def test_another_number_of_workers_keeps_what_all_shared(
    pool: Pool, schedule: EverySteps, whole: bool, numbers: tuple[int, int]
) -> None:
    settings = settings_of(Counting(whole), schedule)
    states, found = resumed_from(pool, settings, settings, numbers)
    for notes, taken in found:
        late = ["a pending round is dropped"] * schedule.overlap
        assert notes == ["all workers start from the consensus", *late]
        assert torch.equal(taken["params"], mean_of(states))
        for counter in ("steps", "steps_since_round", "began_at"):
            assert taken[counter] == states[0][counter]
        assert taken["round_index"] == (0 if schedule.overlap else states[0]["round_index"])
        for one, other in zip(states[0]["shared"], taken["shared"], strict=True):
            state, again = one["state"], other["state"]
            assert state.keys() == again.keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[name]))
            assert other["received"] is None


def test_another_number_of_workers_resets_what_each_had(pool: Pool) -> None:
    settings = settings_of(GASLoC(), EverySteps(2), topology="ring")
    states, found = resumed_from(pool, settings, settings, (3, 2))
    for notes, taken in found:
        reset = "the state of GASLoC (previous) is reset"
        assert notes == ["all workers start from the consensus", reset]
        (shared,) = taken["shared"]
        for vector in (taken["params"], *shared["state"].values()):
            assert torch.equal(vector, mean_of(states))
        assert taken["steps"] == STEPS
        assert taken["round_index"] == states[0]["round_index"]
        assert taken["steps_since_round"] == 0


def halved(round_index: int) -> float:
    """An outer learning rate schedule."""
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


def test_another_number_of_workers_drops_what_compression_had_left_over(pool: Pool) -> None:
    settings = settings_of(DiLoCo(), EverySteps(2), compression=rounding(DiLoCo()))
    states, found = resumed_from(pool, settings, settings, (3, 2))
    left = torch.stack([state["fragments"][0]["residual"]["residual"] for state in states])
    assert left.abs().max() > 0
    for notes, taken in found:
        assert "the residual of the compression is dropped" in notes
        assert not taken["fragments"][0]["residual"]["residual"].any()


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
        assert notes == ["a pending round is dropped"]
        for shared in taken["shared"]:
            for name in ("outer", "momentum"):
                assert torch.equal(shared["state"][name], states[0]["shared"][0]["state"][name])


def test_a_compression_that_is_no_more_is_named(pool: Pool) -> None:
    with_codec = settings_of(DiLoCo(), EverySteps(2), compression=rounding(DiLoCo()))
    plain = dataclasses.replace(with_codec, compression=None)
    _, found = resumed_from(pool, with_codec, plain, (2, 2))
    assert [notes for notes, _ in found] == [["the residual of the compression is dropped"]] * 2
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
def test_a_pending_round_is_dropped_where_none_may_be_pending(
    pool: Pool, algorithm: Algorithm, schedule: EverySteps
) -> None:
    late = dataclasses.replace(schedule, overlap=True)
    before, now = settings_of(algorithm, late), settings_of(algorithm, schedule)
    states, found = resumed_from(pool, before, now, (2, 2))
    for own, (notes, taken) in zip(states, found, strict=True):
        assert notes == ["a pending round is dropped"]
        assert torch.equal(taken["params"], own["params"])
        for one, other in zip(own["shared"], taken["shared"], strict=True):
            assert other["received"] is None
            torch.testing.assert_close(other["state"], one["state"], rtol=0, atol=0)
        assert all(fragment["pending"] is None for fragment in taken["fragments"])


def test_an_eager_round_that_is_dropped_restarts_at_the_consensus(pool: Pool) -> None:
    """The workers took different outer steps, which only the end of the round would correct."""
    before, now = settings_of(EagerDiLoCo(), LATE), settings_of(EagerDiLoCo(), EverySteps(2))
    states, found = resumed_from(pool, before, now, (2, 2))
    assert states[0]["shared"][0]["state"]["under_way"] == 1
    for notes, taken in found:
        reset = "the state of EagerDiLoCo (own, under_way) is reset"
        dropped = "a pending round is dropped"
        assert notes == ["all workers start from the consensus", dropped, reset]
        (shared,) = taken["shared"]
        assert torch.equal(shared["state"]["outer"], mean_of(states))
        assert shared["state"]["under_way"] == 0
