"""The counters of a worker, and what of them goes into a checkpoint."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch

from lightning_loco.comm.stats import Statistics


def test_counting_goes_on_from_a_checkpoint() -> None:
    old = Statistics(rounds=7, bytes_sent=10**12, wait_s=1.5, staleness=1, outer_grad_norm=2.0)
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    new = Statistics()
    new.load_state_dict(torch.load(file, weights_only=True))
    assert new == Statistics(rounds=7, bytes_sent=10**12, wait_s=1.5)


def test_counters_that_came_as_tensors_are_numbers_again() -> None:
    statistics = Statistics()
    statistics.load_state_dict(
        {"rounds": torch.tensor(3), "bytes_sent": torch.tensor(4.0), "wait_s": torch.tensor(0.5)}
    )
    assert [type(v) for v in statistics.state_dict().values()] == [int, int, float]


def test_an_incomplete_checkpoint_is_an_error() -> None:
    with pytest.raises(KeyError, match="wait_s"):
        Statistics().load_state_dict({"rounds": 1, "bytes_sent": 1})


def test_two_workers_share_nothing() -> None:
    first, second = Statistics(), Statistics()
    first.losses.append(1.0)
    assert second.losses == []
    assert dataclasses.asdict(second) == dataclasses.asdict(Statistics())
