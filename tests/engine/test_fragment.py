"""A fragment: undivided state is passed whole, and slices are as long as granularity allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import Simulation, StepEngine
from lightning_loco.algorithms import DiLoCo
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.model.flat import FlatLayout
from lightning_loco.schedules import EverySteps
from tests.harness.pool import Pool, run_each
from tests.harness.rounds import (
    LARGE,
    SMALL_BUCKET,
    Counting,
    Forgetful,
    SignBlocks,
    approach,
    saved_and_loaded,
    simulate,
    train,
    zeros,
)
from tests.harness.small_model import flat
from tests.harness.toys import assert_close, randn

ROUNDS = 4


@pytest.mark.parametrize("overlap", [False, True])
def test_state_that_is_not_cut_counts_rounds_and_not_chunks(pool: Pool, overlap: bool) -> None:
    """By chunks or as a whole, in processes, resumed or in the simulation."""
    schedule = EverySteps(2, overlap)
    expected = simulate(RoundSettings(Counting(whole=True), schedule), 3, ROUNDS)
    by_chunks = RoundSettings(Counting(), schedule)
    assert_close(simulate(by_chunks, 3, ROUNDS), expected)
    rows = {
        "unbroken": (by_chunks, ROUNDS),
        "resumed": (by_chunks, ROUNDS, zeros, 2),
        "whole": (RoundSettings(Counting(whole=True), schedule), ROUNDS),
    }
    results = run_each(pool, train, rows, world=3)
    unbroken, resumed, whole = (torch.stack(results[name], dim=1) for name in rows)
    assert_close(unbroken, expected)
    assert torch.equal(resumed, unbroken)
    assert_close(whole, expected)


def counters(rank: int, world: int) -> list[dict[str, Any]]:
    model = zeros()
    engine = StepEngine(model, Counting(), sync_every=1, bucket_bytes=SMALL_BUCKET)
    memory = engine.fragments[0].memory
    assert len(memory.buckets) == 5
    seen = []
    for _ in range(2):
        approach(rank, model)
        engine.step()
        seen.append({k: v for k, v in memory.state.items() if k != "outer"})
    saved = saved_and_loaded(engine.state_dict())
    engine.close()
    engine = StepEngine(zeros(), Counting(), sync_every=1, bucket_bytes=SMALL_BUCKET)
    engine.load_state_dict(saved)
    seen.append({k: v for k, v in engine.fragments[0].state.items() if k != "outer"})
    engine.close()
    return seen


def test_counters_of_any_kind_are_in_the_fragments_state_and_are_resumed(pool: Pool) -> None:
    for first, second, loaded in pool.run(counters, world=2):
        assert (first["rounds"], second["rounds"], loaded["rounds"]) == (1, 2, 2)
        assert float(second["scale"]) == float(loaded["scale"]) == pytest.approx(0.81)
        assert second["matrix"].tolist() == loaded["matrix"].tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_entry_that_is_made_in_a_round_is_refused_by_its_name(overlap: bool) -> None:
    engine = StepEngine(
        zeros(), Forgetful(), sync_every=1, overlap=overlap, bucket_bytes=SMALL_BUCKET
    )
    with pytest.raises(RuntimeError, match="Forgetful has made .* entry surprise in a round"):
        engine.step()
    engine.close()
    simulation = Simulation([zeros()], Forgetful(), overlap=overlap)
    with pytest.raises(RuntimeError, match="entry surprise in a round"):
        simulation.make_round()


class Gaps(nn.Module):
    """Parameters of odd sizes; some are views with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        kwargs = {"dtype": torch.float64}
        self.a = nn.Parameter(torch.zeros(1003, **kwargs))
        self.b = nn.Parameter(torch.zeros(50, 6, **kwargs)[:, ::2])
        self.c = nn.Parameter(torch.zeros(5, **kwargs))
        self.d = nn.Parameter(torch.zeros(907, 4, **kwargs)[:, 1:])
        self.e = nn.Parameter(torch.zeros(2001, **kwargs))
        self.f = nn.Parameter(torch.zeros(3, 3, **kwargs)[:, :1])


def train_blocks(rank: int, world: int, algorithm: SignBlocks) -> tuple[Tensor, list[int]]:
    model = Gaps()
    assert not model.d.is_contiguous()
    SignBlocks.seen.clear()
    engine = StepEngine(model, algorithm, sync_every=2, bucket_bytes=SMALL_BUCKET)
    for _ in range(6):
        approach(rank, model)
        engine.step()
    engine.close()
    return flat(model), list(SignBlocks.seen)


def test_slices_are_multiples_of_the_granularity(pool: Pool) -> None:
    """All but the last one, also at tensors with gaps, which cannot be cut."""
    numel = flat(Gaps()).numel()
    assert numel % 4 != 0
    for (whole, lengths), (sliced, seen) in zip(
        pool.run(train_blocks, SignBlocks(whole=True), world=2),
        pool.run(train_blocks, SignBlocks(), world=2),
        strict=True,
    ):
        assert set(lengths) == {numel}
        odd = [length for length in seen if length % 4]
        assert len(seen) >= 3 * 2 * 3
        assert len(odd) == 3 * 2  # the last slice of each proposal and each update
        assert sum(seen) == 3 * 2 * numel
        assert torch.equal(sliced, whole)


def memory_of(
    numel: int, bucket_bytes: int, overlap: bool = False, statuses: int = 0
) -> FragmentMemory:
    schedule = EverySteps(1, overlap)
    settings = RoundSettings(DiLoCo(0.7, 0.0), schedule, bucket_bytes=bucket_bytes).prepare(1)
    layout = FlatLayout([("p", randn(numel))], settings.cuts(numel, 8))
    state = {"outer": layout.new_flat()}
    elements = settings.bucket_elements(numel, 8)
    return FragmentMemory(layout, [range(numel)], settings, state, {}, elements, statuses)


def num_wires(memory: FragmentMemory) -> int:
    return len({bucket.wire.data_ptr() for bucket in memory.buckets})


def test_a_blocking_fragment_larger_than_the_bucket_uses_two_buckets_in_turn() -> None:
    memory = memory_of(LARGE, SMALL_BUCKET)
    assert (len(memory.buckets), num_wires(memory), memory.holds_all) == (5, 2, False)


@pytest.mark.parametrize(("numel", "overlap"), [(1500, False), (LARGE, True)])
def test_other_fragments_have_memory_for_every_bucket(numel: int, overlap: bool) -> None:
    memory = memory_of(numel, SMALL_BUCKET, overlap)
    assert num_wires(memory) == len(memory.buckets) > 1
    assert memory.holds_all


def test_buckets_cover_the_fragment_once_and_statuses_are_behind_the_first() -> None:
    memory = memory_of(LARGE, SMALL_BUCKET, statuses=7)
    parts = [chunk.params for bucket in memory.buckets for chunk in bucket.chunks]
    covered = [i for part in parts for i in range(part.start, part.stop)]
    assert covered == list(range(LARGE))
    assert [len(bucket.statuses) for bucket in memory.buckets] == [7, 0, 0, 0, 0]
    for bucket in memory.buckets:
        assert len(bucket.wire) == len(bucket) + len(bucket.statuses)
        assert bucket.statuses.data_ptr() == bucket.wire[len(bucket) :].data_ptr()
