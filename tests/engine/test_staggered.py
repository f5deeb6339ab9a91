"""Fragments that take turns and are applied late: streaming DiLoCo, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Simulation
from lightning_loco.algorithms import DiLoCo, GASLoC, Mix, ModelAverage
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.model.worker import EarlierRun
from lightning_loco.schedules import EverySteps, Schedule, Staggered
from tests.engine.fragments import simulate, slices_of, stream, train
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError, run_each
from tests.harness.rounds import Counting, approach, rounding, saved_and_loaded
from tests.harness.small_model import flat
from tests.harness.toys import SIZES, Layers, assert_close

DILOCO = DiLoCo(0.4, 0.9)
LAG_S = 1.0


def settings_of(
    every: int, fragments: int, delay: int, mix: float, pattern: Any = "strided"
) -> RoundSettings:
    return RoundSettings(DILOCO, Staggered(every, fragments, delay, pattern), merge_policy=Mix(mix))


# ------------------------------------------------------------------------- torchft's numbers

# Its regression fixtures: two fragments, a constant drift of -2 a step from 1, outer SGD(2), two
# equal workers. Local parameters after each step; outer parameters after steps 3, 6, 9, 12.
AT_ONCE = (
    [-1, -3, -11, -13, -15, -17, -19, -21, -35],
    [-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47],
    [(-11, 1), (-11, -23), (-35, -23), (-35, -47)],
)
ONE_LATE = (
    [-1, -3, -6, -8, -10, -12, -14, -16, -21.5],
    [-1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29],
    [(-7, 1), (-7, -19), (-25, -19), (-25, -31)],
)


def drift(rank: int, world: int, delay: int, mix: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return local and outer parameters after each step.

    torchft starts a round early and applies it at the multiple of three; here it starts there. So
    the first ``delay`` steps have no progress, and are not recorded.
    """
    model = Layers((1, 1))
    for p in model.parameters():
        p.data.fill_(1.0)
    schedule = Staggered(6, 2, delay)
    engine = Engine.from_settings(
        model, RoundSettings(DiLoCo(2.0, 0.0), schedule, merge_policy=Mix(mix))
    )
    local, outer = [], []
    for step in range(1, 13 + delay):
        for p in model.parameters():
            p.data.sub_(2.0 if step > delay else 0.0)
        engine.step()
        if step > delay:
            local.append(flat(model))
            of_all = engine.outer()
            assert of_all is not None
            outer.append(of_all.clone())
    engine.close()
    return local, outer


@pytest.mark.parametrize(
    ("delay", "mix", "expected"), [(0, 0.0, AT_ONCE), (1, 0.5, ONE_LATE)], ids=str
)
def test_the_numbers_of_torchft(pool: Pool, delay: int, mix: float, expected: Any) -> None:
    first, second, outer = expected
    for found, found_outer in pool.run(drift, delay, mix, world=2):
        assert [float(values[0]) for values in found[: len(first)]] == first
        assert [float(values[1]) for values in found[: len(second)]] == second
        assert [tuple(values.tolist()) for values in found_outer[2::3]] == outer


# ----------------------------------------------------------------------------- a plain loop

SHAPES = {
    "at once": (7, 3, 0, 0.5),
    "before the next begins": (7, 3, 2, 0.5),
    "several pending": (7, 3, 5, 0.25),
    "a whole phase late": (7, 3, 7, 0.5),
    "one fragment": (6, 1, 4, 0.0),
    "results aside": (4, 2, 3, 1.0),
}


def test_every_step_is_that_of_a_plain_loop(pool: Pool, subtests: pytest.Subtests) -> None:
    """With three processes, in a simulation and by hand; also at the end."""
    rows = {name: (settings_of(*shape), 2 * shape[0]) for name, shape in SHAPES.items()}
    for name, results in run_each(pool, train, rows, world=3).items():
        with subtests.test(name):
            settings, steps = rows[name]
            expected = stream(settings, 3, steps)
            assert_close(torch.stack([history for history, _ in results], dim=1), expected.history)
            for _, end in results:
                assert torch.equal(end, results[0][1])
                assert_close(end, expected.consensus)
            simulated = simulate(settings, 3, steps)
            assert_close(simulated.history, expected.history)
            assert_close(simulated.consensus, expected.consensus)


def train_lengths(rank: int, world: int, settings: RoundSettings, lengths: range) -> list[Tensor]:
    return [train(rank, world, settings, steps)[1] for steps in lengths]


@pytest.mark.parametrize(
    ("delay", "lengths"), cover([0, 2, 5], [range(1, 5), range(5, 9), range(9, 15)], strength=1)
)
def test_a_run_may_end_after_any_step(pool: Pool, delay: int, lengths: range) -> None:
    """The result is the mean of the workers' parameters, with or without pending fragments."""
    settings = settings_of(6, 3, delay, 0.5)
    expected = [stream(settings, 2, steps).consensus for steps in lengths]
    for ends in pool.run(train_lengths, settings, lengths, world=2):
        assert_close(torch.stack(ends), torch.stack(expected))


@pytest.mark.parametrize(
    "pattern", ["contiguous", [r"blocks\.[04]", r"blocks\.[13]", r"blocks\.2"]]
)
def test_fragments_may_be_chosen_otherwise(pool: Pool, pattern: Any) -> None:
    settings = settings_of(6, 3, 2, 0.5, pattern)
    assert slices_of(settings) != slices_of(settings_of(6, 3, 2, 0.5))
    expected = stream(settings, 2, 13)
    results = pool.run(train, settings, 13, world=2)
    assert_close(torch.stack([history for history, _ in results], dim=1), expected.history)


@pytest.mark.parametrize("delay", [0, 2, 5])
def test_a_backend_that_brings_data_late_gives_the_same_numbers(pool: Pool, delay: int) -> None:
    settings = settings_of(6, 3, delay, 0.5)
    rows = {late: (settings, 11, (), False, late) for late in (False, True)}
    results = run_each(pool, train, rows, world=2)
    for (history, end), (expected, expected_end) in zip(*results.values(), strict=True):
        assert torch.equal(history, expected)
        assert torch.equal(end, expected_end)


def end_early(rank: int, world: int, settings: RoundSettings, late: bool) -> Tensor:
    """Give worker 0 the fewest steps; it takes part in the others' rounds at its end."""
    return train(rank, world, settings, 5 + 4 * rank, (), False, late)[1]


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.soak), 2, 5])
def test_workers_may_have_different_numbers_of_steps(pool: Pool, delay: int) -> None:
    settings = settings_of(6, 3, delay, 0.5)
    rows = {late: (settings, late) for late in (False, True)}
    on_gloo, on_late = run_each(pool, end_early, rows, world=3).values()
    for end, late in zip(on_gloo, on_late, strict=True):
        assert torch.isfinite(end).all()
        assert torch.equal(end, on_gloo[0])
        assert torch.equal(late, end)


# ------------------------------------------------------------------------------- identities


def both(pool: Pool, first: RoundSettings, second: RoundSettings) -> None:
    results = run_each(pool, train, {1: (first, 20), 2: (second, 20)}, world=2)
    for one, other in zip(*results.values(), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_one_fragment_without_delay_is_diloco_bit_for_bit(pool: Pool, mix: float) -> None:
    both(pool, settings_of(6, 1, 0, mix), RoundSettings(DILOCO, EverySteps(6)))


@pytest.mark.parametrize("warm_start", [False, True])
def test_one_fragment_a_whole_phase_late_is_async_diloco_bit_for_bit(
    pool: Pool, warm_start: bool
) -> None:
    algorithm = DiLoCo(0.7, 0.3)
    late = RoundSettings(algorithm, EverySteps(6, True, warm_start))
    both(pool, RoundSettings(algorithm, Staggered(6, 1, 6, warm_start=warm_start)), late)


def test_results_aside_workers_train_alone_and_outer_parameters_move(pool: Pool) -> None:
    settings = settings_of(6, 2, 1, 1.0)
    for rank, (history, end) in enumerate(pool.run(train, settings, 12, world=2)):
        model = Layers()
        alone = []
        for _ in range(12):
            approach(rank, model)
            alone.append(flat(model))
        assert torch.equal(history, torch.stack(alone))
        assert end.norm() > 1


@pytest.mark.parametrize(
    "settings",
    [
        RoundSettings(GASLoC(), Staggered(6, 2, 2), topology="ring"),
        RoundSettings(ModelAverage(), Staggered(6, 3, 5)),
        RoundSettings(Counting(), Staggered(6, 3, 2), merge_policy=Mix(0.5)),
    ],
    ids=lambda settings: type(settings.algorithm).__name__,
)
def test_other_algorithms_go_by_fragments(pool: Pool, settings: RoundSettings) -> None:
    simulated = simulate(settings, 3, 12)
    results = pool.run(train, settings, 12, world=3)
    assert_close(torch.stack([history for history, _ in results], dim=1), simulated.history)


def train_unevenly(rank: int, world: int, settings: RoundSettings) -> Tensor:
    return train(rank, world, settings, 12 * (rank + 1))[1]


def test_workers_of_different_pace(pool: Pool) -> None:
    settings = RoundSettings(DILOCO, Staggered([6, 12], 3, 2), merge_policy=Mix(0.5))
    models = [Layers() for _ in range(2)]
    simulation = Simulation.from_settings(models, settings)
    simulation.run(lambda worker: approach(worker, models[worker]), 6)
    for end in pool.run(train_unevenly, settings, world=2):
        assert_close(end, simulation.consensus())


# ------------------------------------------------------------------- validation and resumption


@pytest.mark.parametrize("delays", [(2, 6), pytest.param((0, 5), marks=pytest.mark.soak)], ids=str)
def test_a_validation_changes_nothing(
    pool: Pool, delays: tuple[int, ...], subtests: pytest.Subtests
) -> None:
    validated, unbroken = (
        run_each(
            pool,
            train,
            {delay: (settings_of(6, 3, delay, 0.5), 14, (), syncs) for delay in delays},
            world=2,
        )
        for syncs in (True, False)
    )
    for delay in delays:
        with subtests.test(delay=delay):
            for one, other in zip(validated[delay], unbroken[delay], strict=True):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


RESUMED = {
    # Of three fragments two are pending at most steps with a delay of 5, and all with 6.
    **{f"{delay=}": settings_of(6, 3, delay, 0.5) for delay in (0, 5, 6, 2)},
    "a whole phase late": RoundSettings(DiLoCo(0.7, 0.0), Staggered(6, 3, 6)),
    "with a residual": RoundSettings(
        DILOCO, Staggered(6, 3, 5), compression=rounding(DILOCO), merge_policy=Mix(0.5)
    ),
    "gossip": RoundSettings(GASLoC(), Staggered(6, 3, 5), topology="ring"),
}


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("steps", "runs", "names"),
    [
        pytest.param(14, [range(6, 13)], list(RESUMED)[3:], id="after each"),
        pytest.param(
            20,
            [range(6, 13), *([step] for step in range(6, 13))],
            list(RESUMED),
            id="after one",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(
    pool: Pool,
    steps: int,
    runs: list[Sequence[int]],
    names: list[str],
    subtests: pytest.Subtests,
) -> None:
    rows = {
        (name, str(cuts)): (RESUMED[name], steps, cuts) for name in names for cuts in ((), *runs)
    }
    results = run_each(pool, train, rows, world=2)
    for name, cuts in rows:
        with subtests.test(name, cuts=cuts):
            for one, other in zip(results[name, cuts], results[name, "()"], strict=True):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


def numbers_of_pending(rank: int, world: int) -> list[int]:
    """Return the number of pending rounds after each step."""
    model = Layers()
    engine = Engine.from_settings(model, settings_of(6, 3, 5, 0.5))
    counts = []
    for _ in range(14):
        approach(rank, model)
        engine.step()
        counts.append(sum(fragment.pending is not None for fragment in engine.fragments))
    engine.close()
    return counts


def test_several_fragments_are_pending_at_once(pool: Pool) -> None:
    for counts in pool.run(numbers_of_pending, world=2):
        assert counts == [0, 1, 1, 2, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]


def lag(rank: int, world: int) -> float:
    """Let worker 1 be late for the second fragment when the first one's result has arrived."""
    model = Layers()
    engine = Engine.from_settings(model, settings_of(4, 2, 3, 0.5))
    for step in range(1, 6):
        if rank == 1 and step == 4:
            time.sleep(LAG_S)
        approach(rank, model)
        engine.step()
    waited_s = engine.statistics.wait_s
    engine.finish()
    engine.close()
    return waited_s


@pytest.mark.alone
def test_apply_waits_for_no_round_that_has_begun_since(pool: Pool) -> None:
    for waited_s in pool.run(lag, world=2):
        assert waited_s < LAG_S / 2


# ---------------------------------------------------------------------------------- memory


def elements(rank: int, world: int, delay: int, dtype: torch.dtype) -> dict[str, Any]:
    engine = Engine.from_settings(Layers(dtype=dtype), settings_of(6, 3, delay, 0.5))
    fragments = [fragment.memory for fragment in engine.fragments]
    kept = [fragment.sent_params for fragment in fragments]
    messages = [message for memory in fragments for message in (b.message for b in memory.buckets)]
    found = {
        "messages": sum(message.numel() for message in messages),
        "memory": len({message.untyped_storage().data_ptr() for message in messages}),
        "outer": len({fragment.state["outer"].data_ptr() for fragment in fragments}),
        "sent_params": len({None if d is None else d.data_ptr() for d in kept} - {None}),
    }
    engine.close()
    return found


def test_fragments_share_what_is_as_long_as_the_model(pool: Pool) -> None:
    expected = {"messages": sum(SIZES), "memory": 3, "outer": 1, "sent_params": 0}
    for dtype in (torch.float64, torch.bfloat16):
        is_rounded = dtype == torch.bfloat16
        for found in pool.run(elements, 2, dtype, world=2):
            assert found == {**expected, "sent_params": int(is_rounded)}


def hold_still(rank: int, world: int, dtype: torch.dtype) -> Tensor:
    """Take one step that moves the parameters, and then none: the outer parameters follow."""
    model = Layers((4, 4), dtype)
    settings = RoundSettings(DiLoCo(0.3, 0.0), Staggered(4, 2, 1), merge_policy=Mix(0.75))
    engine = Engine.from_settings(model, settings)
    for step in range(40):
        for p in model.parameters():
            p.data.add_(1.0 + rank if step == 0 else 0.0)
        engine.step()
    engine.finish()
    outer = engine.outer()
    assert outer is not None
    engine.close()
    return outer.double()


def test_narrow_parameters_lose_nothing_of_what_is_mixed(pool: Pool) -> None:
    expected = pool.run(hold_still, torch.float64, world=2)[0]
    for found in pool.run(hold_still, torch.bfloat16, world=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------- metrics, input


def metrics(rank: int, world: int) -> tuple[list[float], int, float]:
    model = Layers((1, 1))
    schedule = Staggered(4, 2, 1)
    engine = Engine.from_settings(
        model, RoundSettings(DiLoCo(1.0, 0.0), schedule, merge_policy=Mix(0.0))
    )
    engine.measure_outer_gradient = True
    norms = []
    for _ in range(8):
        for scale, p in zip((1.0, 10.0), model.parameters(), strict=True):
            p.data.add_(scale)
        engine.step()
        norms.append(engine.statistics.outer_grad_norm or 0.0)
    engine.close()
    return norms, engine.statistics.rounds, engine.statistics.staleness


def test_metrics_are_those_of_the_fragment_that_was_applied_last(pool: Pool) -> None:
    for norms, rounds, staleness in pool.run(metrics, world=2):
        assert norms == pytest.approx([0, 0, 2, 2, 40, 40, 3, 3])
        assert (rounds, staleness) == (4, 0.25)


def refused(rank: int, world: int, settings: RoundSettings) -> None:
    Engine.from_settings(Layers(), settings)


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize(
    ("algorithm", "schedule", "text"),
    [
        (DILOCO, Staggered(6, 6, 1), r"fragments=6 is more than the 5 layers .*'blocks.0'"),
        (DILOCO, Staggered(6, 2, 1, ["blocks.0", "blocks.1"]), "'blocks.2.value' must match one"),
        (DiLoCo(outer_optimizer=adamw), Staggered(6, 2), "whole vector .* in 2 parts. Use frag"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_worker(
    pool: Pool, algorithm: DiLoCo, schedule: Schedule, text: str
) -> None:
    with pytest.raises(PoolError, match=text) as error:
        pool.run(refused, RoundSettings(algorithm, schedule), world=2)
    assert sorted(error.value.failures) == [0, 1]


def go_on(
    rank: int, world: int, before: RoundSettings, now: RoundSettings
) -> tuple[list[str], int, Tensor]:
    """Continue with other settings; return dropped state, pending rounds, and the final mean."""
    model = Layers()
    engine = Engine.from_settings(model, before)
    for _ in range(8):
        approach(rank, model)
        engine.step()
    engine.sync_point("a checkpoint")
    state, described = saved_and_loaded(engine.state_dict()), engine.settings.describe()
    engine.close()
    engine = Engine.from_settings(Layers(), now)
    engine.worker.replica.layout.write(state["shared"][0]["state"]["outer"])
    saved = EarlierRun(state, "DiLoCo", described, has_same_workers=True)
    notes = engine.resume_from(saved)
    pending_rounds = sum(fragment.pending is not None for fragment in engine.fragments)
    for _ in range(7):
        engine.step()
    engine.finish()
    outer = engine.outer()
    assert outer is not None
    engine.close()
    return notes, pending_rounds, outer.clone()


def test_a_run_goes_on_with_other_fragments(pool: Pool, subtests: pytest.Subtests) -> None:
    dropped = ["a pending round is dropped"]
    rows: dict[str, tuple[RoundSettings, list[str], int]] = {
        "the same": (settings_of(6, 3, 5, 0.5), [], 3),
        "other rounds": (settings_of(8, 3, 1, 0.0), [], 3),
        "another pattern": (settings_of(6, 3, 5, 0.5, "contiguous"), dropped, 0),
        "another number": (settings_of(6, 2, 5, 0.5), dropped, 0),
        "no delay": (settings_of(6, 3, 0, 0.5), dropped, 0),
        "no fragments": (RoundSettings(DILOCO, EverySteps(6)), dropped, 0),
    }
    calls = {name: (settings_of(6, 3, 5, 0.5), now) for name, (now, _, _) in rows.items()}
    for name, results in run_each(pool, go_on, calls, world=2).items():
        with subtests.test(name):
            _, notes, pending_rounds = rows[name]
            for found, pending_now, outer in results:
                assert (found, pending_now) == (notes, pending_rounds)
                assert torch.isfinite(outer).all()
                assert torch.equal(outer, results[0][2])
