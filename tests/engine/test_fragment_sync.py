"""A round is applied completely or not at all: a failure before leaves every bit unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco._util.fault_points import on_reach
from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC, LocalSGD, ModelAverage
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.worker_status import KnownStatuses, WorkerStatus
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.engine.engine import run_through
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.fragment_sync import FragmentSync, Round
from lightning_loco.model.flat import FlatLayout
from lightning_loco.schedules import EveryInterval, EverySteps, Schedule
from tests.harness.pool import Pool
from tests.harness.rounds import SMALL_BUCKET, Counting, approach, rounding
from tests.harness.toys import Point, randn

FITS = 2000
"""Number of elements that fill two buckets of the smallest size."""

# ------------------------------------------------------------- between real processes


@contextmanager
def losing(number: int) -> Iterator[list[str]]:
    """Lose the bucket with that number; yield the fault points reached since then."""
    reached: list[str] = []

    def act(point: str) -> None:
        reached.append(point)
        if point == "after receiving" and reached.count(point) == number:
            raise RuntimeError("the bucket is lost")

    with on_reach(act):
        yield reached


def everything(engine: Engine) -> list[Any]:
    """Return the parameters and all state entries, for exact comparison."""
    values: list[Any] = [engine.worker.replica.layout.new_flat()]
    for fragment in engine.fragments:
        for state in (fragment.memory.state, fragment.memory.residual):
            values += [copy.deepcopy(state[key]) for key in sorted(state)]
    return values


def same(first: list[Any], second: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def fail_in_round(
    rank: int, world: int, settings: RoundSettings, numel: int, number: int
) -> dict[str, Any]:
    """Run two successful rounds, and a third one that loses a bucket."""
    model = Point(torch.zeros(numel, dtype=torch.float64))
    engine = Engine.from_settings(model, settings)
    error, before, armed = "", everything(engine), False
    with ExitStack() as stack:
        while not error:
            approach(rank, model)
            engine.count_step()
            if not engine.check_due():
                continue
            if engine.worker.round_index == 2 and not armed:
                armed = True
                stack.enter_context(losing(number))
            before = everything(engine)
            try:
                engine.make_round()
            except RuntimeError as raised:
                error = str(raised)
    result = {
        "error": error,
        "same": same(before, everything(engine)),
        "torn": engine.fragments[0].is_torn,
        "buckets": len(engine.fragments[0].memory.buckets),
    }
    if result["torn"]:
        with pytest.raises(RuntimeError, match="Go back to the last checkpoint"):
            engine.state_dict()
    engine.close()
    return result


STEPS, LATE, CLOCK = EverySteps(1), EverySteps(1, overlap=True), EveryInterval(0.0)


def test_a_round_that_loses_its_second_bucket_changes_nothing(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """Neither parameters, state nor residuals: blocking, overlapped and by the clock."""
    ways: dict[str, tuple[Algorithm, Schedule]] = {
        "diloco": (DiLoCo(), STEPS),
        "counting": (Counting(), STEPS),
        "local sgd": (LocalSGD(), STEPS),
        "gasloc": (GASLoC(), STEPS),
        "late diloco": (DiLoCo(0.7, 0.3), LATE),
        "late average": (ModelAverage(), LATE),
        "late gasloc": (GASLoC(), LATE),
        "average by the clock": (ModelAverage(), CLOCK),
        "gasloc by the clock": (GASLoC(), CLOCK),
    }
    for name, (algorithm, schedule) in ways.items():
        with subtests.test(name):
            bucket_bytes = SMALL_BUCKET * (8 if isinstance(algorithm, GASLoC) else 4)
            settings = RoundSettings(
                algorithm, schedule, compression=rounding(algorithm), bucket_bytes=bucket_bytes
            )
            for result in pool.run(fail_in_round, settings, FITS, 2, world=2):
                assert result == {
                    "error": "the bucket is lost",
                    "same": True,
                    "torn": False,
                    "buckets": 2,
                }


def test_a_round_larger_than_the_bucket_that_fails_is_torn_and_not_saved(pool: Pool) -> None:
    """With two pending buckets, the first one is already applied when the fourth is lost."""
    settings = RoundSettings(
        DiLoCo(), STEPS, compression=rounding(DiLoCo()), bucket_bytes=SMALL_BUCKET
    )
    for result in pool.run(fail_in_round, settings, 5000, 4, world=2):
        assert result == {"error": "the bucket is lost", "same": False, "torn": True, "buckets": 5}


def vanish(rank: int, world: int, settings: RoundSettings) -> tuple[bool, bool, str]:
    """Let a worker exit between two rounds."""
    model = Point(torch.zeros(FITS, dtype=torch.float64))
    engine = Engine.from_settings(model, settings, WorkerGroup.create(timeout_s=2))
    for _ in range(2):
        approach(rank, model)
        engine.step()
    if rank == 1:
        engine.close()
        return True, False, ""
    error = ""
    while not error:
        approach(rank, model)
        before = everything(engine)
        try:
            engine.step()
        except RuntimeError as raised:
            error = str(raised)
    result = same(before, everything(engine)), engine.fragments[0].is_torn, error
    engine.close()
    return result


@pytest.mark.process
@pytest.mark.parametrize("algorithm", [DiLoCo(), GASLoC()], ids=str)
def test_a_worker_that_vanishes_leaves_the_others_as_they_were(
    pool: Pool, algorithm: Algorithm
) -> None:
    (unchanged, torn, error), _ = pool.run(vanish, RoundSettings(algorithm, STEPS), world=2)
    assert unchanged
    assert not torn
    assert "No message in round 2" in error


# ---------------------------------------------------------------- without an engine


def run(fragment: FragmentSync, index: int, weight: float = 1.0, finite: float = 1.0) -> Round:
    """Run a round with known statuses; an overlapped one stays pending."""
    fragment.prepare(index)
    new = fragment.new_round(index, 0, weight)
    new.statuses = KnownStatuses([WorkerStatus(0.0, index, 1.0, weight, finite)], f"round {index}")
    run_through(fragment.run(new))
    return new


def fragment_of(
    algorithm: Algorithm,
    numel: int,
    overlap: bool = False,
    bucket_bytes: int = SMALL_BUCKET,
) -> tuple[FragmentSync, FlatLayout]:
    schedule = EverySteps(1, overlap, warm_start=False)
    settings = RoundSettings(algorithm, schedule, bucket_bytes=bucket_bytes).prepare(1)
    layout = FlatLayout([("p", randn(numel))], settings.cuts(numel, 8))
    state = settings.algorithm.init(layout.new_flat())
    elements = settings.bucket_elements(numel, 8)
    memory = FragmentMemory(layout, [range(numel)], settings, state, {}, elements)
    exchange = make_exchange(LocalSGD(), WorkerGroup(0, 1), Statistics(), None)
    return FragmentSync(memory, settings, exchange), layout


@pytest.mark.parametrize(("fails", "torn"), [(1, False), (2, True), (5, True)])
def test_a_round_applied_bucket_by_bucket_is_torn_once_one_was_applied(
    fails: int, torn: bool
) -> None:
    fragment, layout = fragment_of(DiLoCo(), 5000)
    layout.tensors[0].add_(1.0)
    before = layout.new_flat()
    with losing(fails), pytest.raises(RuntimeError, match="the bucket is lost"):
        run(fragment, 0)
    assert fragment.is_torn is torn
    assert torch.equal(layout.new_flat(), before) is not torn


@pytest.mark.parametrize("numel", [FITS, 5000])
def test_a_round_without_any_weight_has_changed_nothing(numel: int) -> None:
    fragment, layout = fragment_of(DiLoCo(), numel)
    layout.tensors[0].add_(1.0)
    before = layout.new_flat()
    with pytest.raises(RuntimeError, match="No worker has made finite progress in round 0"):
        run(fragment, 0, weight=0.0, finite=0.0)
    assert not fragment.is_torn
    assert torch.equal(layout.new_flat(), before)


def test_a_round_without_progress_leaves_the_outer_parameters() -> None:
    fragment, layout = fragment_of(DiLoCo(), FITS)
    outer = fragment.state["outer"].clone()
    layout.tensors[0].add_(1.0)
    run(fragment, 0, weight=0.0)
    assert torch.equal(fragment.state["outer"], outer)
    assert torch.equal(layout.new_flat(), outer)


def test_an_overlapped_round_that_is_lost_has_changed_nothing() -> None:
    for algorithm in (DiLoCo(0.7, 0.0), ModelAverage(), Counting()):
        fragment, layout = fragment_of(algorithm, 5000, overlap=True)
        run(fragment, 0)
        layout.tensors[0].add_(1.0)
        params, state = layout.new_flat(), copy.deepcopy(fragment.memory.state)
        with losing(2) as reached, pytest.raises(RuntimeError, match="the bucket is lost"):
            run(fragment, 1)
        assert "before sending" not in reached  # nothing new was sent
        assert torch.equal(layout.new_flat(), params)
        assert same(list(fragment.memory.state.values()), list(state.values()))
        assert not fragment.is_torn


def test_prepare_finds_values_that_are_not_finite_wherever_they_are() -> None:
    for numel in (FITS, 5000):  # computed as a whole, or bucket by bucket
        fragment, layout = fragment_of(DiLoCo(), numel)
        assert fragment.prepare(0)
        layout.tensors[0][numel - 1] = torch.inf
        assert not fragment.prepare(0)


def test_large_finite_values_are_finite_although_their_sum_is_not() -> None:
    fragment, layout = fragment_of(LocalSGD(), FITS)
    layout.tensors[0].fill_(1e308)
    assert fragment.prepare(0)


def test_the_norm_of_the_outer_gradient_is_measured_on_request() -> None:
    fragment, layout = fragment_of(DiLoCo(), 5000)
    layout.tensors[0].add_(2.0)
    for measure in (False, True):
        fragment.measure_gradient = measure
        run(fragment, 0)
        if not measure:
            assert fragment.gradient_norm is None
            fragment, layout = fragment_of(DiLoCo(), 5000)
            layout.tensors[0].add_(2.0)
    assert fragment.gradient_norm == pytest.approx(2.0 * 5000**0.5)


def test_a_pending_round_cannot_be_loaded_without_overlap() -> None:
    late, _ = fragment_of(DiLoCo(0.7, 0.0), 5000, overlap=True)
    run(late, 0)
    saved = late.state_dict()
    blocking, _ = fragment_of(DiLoCo(0.7, 0.0), 5000)
    with pytest.raises(ValueError, match="holds a pending round, but overlap is off"):
        blocking.load_state_dict(*saved)
