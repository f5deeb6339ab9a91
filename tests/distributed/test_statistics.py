"""Statistics of a worker, and their state in a checkpoint."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch

from lightning_loco.distributed.statistics import Spans, Statistics
from tests.harness.manual_clock import ManualClock


def test_counters_continue_from_a_checkpoint() -> None:
    old = Statistics(rounds=7, bytes_sent=10**12, wait_s=1.5, staleness=1, outer_grad_norm=2.0)
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    new = Statistics()
    new.load_state_dict(torch.load(file, weights_only=True))
    assert new == Statistics(rounds=7, bytes_sent=10**12, wait_s=1.5)


def test_counters_loaded_as_tensors_become_numbers() -> None:
    statistics = Statistics()
    statistics.load_state_dict(
        {"rounds": torch.tensor(3), "bytes_sent": torch.tensor(4.0), "wait_s": torch.tensor(0.5)}
    )
    assert [type(v) for v in statistics.state_dict().values()] == [int, int, float, dict]


def test_an_incomplete_checkpoint_is_an_error() -> None:
    with pytest.raises(KeyError, match="wait_s"):
        Statistics().load_state_dict({"rounds": 1, "bytes_sent": 1})


def test_what_the_time_was_for_by_a_clock_that_the_test_advances() -> None:
    clock = ManualClock()
    statistics = Statistics(clock=clock)
    assert statistics.goodput is None
    with statistics.joining():
        clock.advance(20.0)
        statistics.count_wait(clock.now() - 10.0, clock.now())  # for others, and not for the state
    clock.advance(70.0)
    statistics.count_wait(clock.now() - 20.0, clock.now())
    statistics.steps, statistics.lost_steps = 50, 10.0
    goodput = statistics.goodput
    assert goodput is not None
    assert statistics.time_s == 90.0
    expected = {"goodput": 40, "waiting": 30, "joining": 10, "lost": 10, "restarting": 0}
    assert goodput.parts == pytest.approx({part: s / 90 for part, s in expected.items()})


def test_the_time_from_a_checkpoint_to_the_resumption_is_that_of_a_restart() -> None:
    before, after = ManualClock(), ManualClock()
    before.advance(1000.0)
    old = Statistics(clock=before, wait_s=10.0, join_s=5.0, away_s=20.0, lost_steps=2.0)
    before.advance(100.0)
    old.steps = 8
    saved = old.state_dict()
    assert old.spent.compute_s == 65.0
    before.advance(30.0)  # local steps after the checkpoint, which are lost
    after.advance(1160.0)  # the machine has one clock, and the new process has begun at 0
    new = Statistics(clock=after)
    after.advance(15.0)
    new.load_state_dict(saved)
    assert (new.steps, new.lost_steps, new.join_s, new.wait_s) == (8, 2.0, 5.0, 10.0)
    assert (new.time_s, new.away_s) == (175.0, 95.0)
    assert new.spent.compute_s == 65.0
    after.advance(25.0)
    assert (new.time_s, new.spent.compute_s) == (200.0, 90.0)
    assert new.goodput is not None
    parts = [67.5, 10.0, 5.0, 22.5, 95.0]
    assert list(new.goodput.parts.values()) == pytest.approx([s / 200 for s in parts])

    new.load_state_dict({**saved, "spent": {}})  # of another worker, for a new one
    assert new.away_s == 95.0
    on_another_machine = Statistics(clock=ManualClock())  # whose clock is 1100 s behind
    on_another_machine.load_state_dict(saved)
    assert (on_another_machine.time_s, on_another_machine.away_s) == (100.0, 20.0)


def test_statistics_of_two_workers_are_independent() -> None:
    first, second = Statistics(), Statistics()
    first.losses.append(1.0)
    assert second.losses == []
    assert dataclasses.asdict(second) == dataclasses.asdict(Statistics())


def test_spans_keep_the_first_and_the_last_and_sum_all() -> None:
    spans = Spans(limit=3)
    for number in range(10):
        spans.add("wait", number, number + 0.5)
    assert [start for _, start, _ in spans.kept()] == [0, 1, 2, 7, 8, 9]
    assert spans.left_out == 4
    assert spans.seconds == {"wait": 5.0}
    assert spans.busy_s == 5.0


def test_spans_within_others_count_once() -> None:
    spans = Spans()
    spans.add("wait", 1.0, 2.0)
    spans.add("wait", 3.0, 4.0)
    spans.add("sync point", 0.5, 4.5)  # contains both waits
    spans.add("round", 0.0, 10.0)  # in the background
    spans.add("wait", 5.0, 6.0)
    assert spans.busy_s == 5.0
    assert spans.seconds == {"wait": 3.0, "sync point": 2.0, "round": 10.0}


def test_waits_are_recorded_only_if_that_is_wanted() -> None:
    statistics = Statistics()
    statistics.count_wait(1.0, 3.0)
    statistics.spans = Spans()
    statistics.count_wait(4.0, 5.0)
    assert statistics.wait_s == 3.0
    assert statistics.spans.kept() == [("wait", 4.0, 5.0)]
