"""Running statistics are those since the last round."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_loco.model.running_statistics import RunningStatistics

MOMENTUM = 0.25


def model_of(momentum: float | None = MOMENTUM) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum)).double()


def read(model: nn.Module, count: int, seed: int) -> None:
    """Run the model on some batches."""
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(count):
        model(torch.randn(16, 3, generator=generator, dtype=torch.float64))


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([model[1].running_mean, model[1].running_var])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_statistics_are_those_of_the_batches_since_the_round(count: int) -> None:
    """A weighted mean of the batches' statistics, independent of earlier values."""
    model, other = model_of(), model_of()
    other.load_state_dict(model.state_dict())
    read(model, 20, seed=1)
    read(other, 5, seed=2)
    left = []
    for one in (model, other):
        running = RunningStatistics(one)
        running.record(steps_since_round=20)
        read(one, count, seed=3)
        running.remove_before_round()
        left.append(values_of(one))
    torch.testing.assert_close(left[0], left[1], rtol=0, atol=1e-12)

    singles = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        values = model[0](torch.randn(16, 3, generator=generator, dtype=torch.float64))
        singles.append(torch.cat([values.mean(0), values.var(0)]))
    weights = torch.tensor([MOMENTUM * (1 - MOMENTUM) ** (count - 1 - i) for i in range(count)])
    expected = (torch.stack(singles) * (weights / weights.sum())[:, None]).sum(0)
    torch.testing.assert_close(left[0], expected.detach(), rtol=0, atol=1e-6)


def test_statistics_that_are_not_changed() -> None:
    for momentum, steps, count in (
        (MOMENTUM, 20, 0),  # no batch since the last round
        (MOMENTUM, 7, 3),  # rounds come faster than statistics decay
        (None, 20, 3),  # a mean over all batches, as the user has chosen
    ):
        model = model_of(momentum)
        running = RunningStatistics(model)
        read(model, 20, seed=1)
        running.record(steps)
        read(model, count, seed=2)
        before = values_of(model)
        running.remove_before_round()
        assert torch.equal(values_of(model), before), (momentum, steps, count)


def test_recorded_statistics_are_saved_and_loaded() -> None:
    model = model_of()
    running = RunningStatistics(model)
    read(model, 20, seed=1)
    running.record(20)
    read(model, 2, seed=2)
    copied = copy.deepcopy(model)
    resumed = RunningStatistics(copied)
    resumed.load_state_dict(running.state_dict())
    running.remove_before_round()
    resumed.remove_before_round()
    assert torch.equal(values_of(copied), values_of(model))
    running.load_state_dict({})
    before = values_of(model)
    running.remove_before_round()
    assert torch.equal(values_of(model), before)
