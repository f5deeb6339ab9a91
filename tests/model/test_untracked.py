"""Untracked values are compared between the workers; running statistics follow the last round."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.untracked import RunningStatistics, UntrackedParameters
from tests.harness.pool import Pool

MOMENTUM = 0.25


class Net(nn.Module):
    """A trained parameter, a backbone, a teacher and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.backbone = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.teacher = nn.Parameter(torch.ones(2, 3), requires_grad=False)
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.register_buffer("queue", torch.arange(8.0))


def compare(rank: int, world: int, how: str) -> tuple[list[str], list[str], list[float]]:
    net = Net()
    untracked = UntrackedParameters(net, [net.weight], None)
    with torch.no_grad():
        if how == "in place":
            net.teacher.add_(rank)
        elif how == "replaced":
            net.teacher = nn.Parameter(net.teacher.detach() + rank)
        elif how == "another shape":
            net.teacher = nn.Parameter(torch.zeros(rank + 1))
        elif how == "permuted buffer":
            net.queue = net.queue.roll(2 * rank)
        net.weight.add_(rank)
    group = WorkerGroup.create(timeout_s=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        differing, buffers = untracked.compare(group, FlatLayout(net.named_buffers()))
        untracked.compare(group, FlatLayout(net.named_buffers()))
    group.close()
    texts = [str(one.message) for one in caught]
    assert (buffers.names == ["queue"]) == (how == "permuted buffer")
    return differing.names, texts, differing.new_flat().tolist()


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_differing_parameters_are_found(pool: Pool, how: str) -> None:
    for rank, (names, texts, values) in enumerate(pool.run(compare, how, world=3)):
        assert names == ["teacher"]
        assert texts == []
        assert values == [1.0 + rank] * 6


@pytest.mark.parametrize("how", ["not at all", "permuted buffer"])
def test_no_parameter_differs(pool: Pool, how: str) -> None:
    assert pool.run(compare, how, world=2) == [([], [], [])] * 2


def test_values_that_cannot_be_averaged_are_named_once_by_worker_0(pool: Pool) -> None:
    (names, texts, _), (untracked, quiet, _) = pool.run(compare, "another shape", world=2)
    assert names == untracked == []
    assert quiet == []
    (text,) = texts
    assert text.startswith("teacher: these buffers, or parameters that no optimizer has")


def test_load_writes_values_into_the_module() -> None:
    net = Net()
    untracked = UntrackedParameters(net, [net.weight], None)
    untracked.load(["teacher"], torch.arange(6.0))
    assert net.teacher.flatten().tolist() == list(range(6))
    assert untracked.differing.names == ["teacher"]
    assert isinstance(untracked.differing.new_flat(), Tensor)


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
    """They are a weighted mean of the batches' statistics, whatever came before."""
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
        (MOMENTUM, 20, 0),  # no batch since the round
        (MOMENTUM, 7, 3),  # rounds come faster than the statistics forget
        (None, 20, 3),  # an average over all batches, as the user wants it
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
