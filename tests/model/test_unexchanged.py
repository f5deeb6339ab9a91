"""Values outside the exchange are compared between the workers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.unexchanged import UnexchangedValues
from tests.harness.pool import Pool


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
    unexchanged = UnexchangedValues(net, [net.weight], None)
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
        differing, buffers = unexchanged.compare(group, FlatLayout(net.named_buffers()))
        unexchanged.compare(group, FlatLayout(net.named_buffers()))
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
    (names, texts, _), (unexchanged, quiet, _) = pool.run(compare, "another shape", world=2)
    assert names == unexchanged == []
    assert quiet == []
    (text,) = texts
    assert text.startswith("teacher: these buffers, or parameters that no optimizer has")


def test_load_writes_values_into_the_module() -> None:
    net = Net()
    unexchanged = UnexchangedValues(net, [net.weight], None)
    unexchanged.load(["teacher"], torch.arange(6.0))
    assert net.teacher.flatten().tolist() == list(range(6))
    assert unexchanged.differing.names == ["teacher"]
    assert isinstance(unexchanged.differing.new_flat(), Tensor)
