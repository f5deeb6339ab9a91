"""Statistics of a worker, and their state in a checkpoint."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch

from lightning_loco.distributed.statistics import Spans, Statistics


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
    assert [type(v) for v in statistics.state_dict().values()] == [int, int, float]


def test_an_incomplete_checkpoint_is_an_error() -> None:
    with pytest.raises(KeyError, match="wait_s"):
        Statistics().load_state_dict({"rounds": 1, "bytes_sent": 1})


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
