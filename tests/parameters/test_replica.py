"""A replica: local parameters and buffers against the consensus, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.parameters.flat import Cuts
from lightning_loco.parameters.replica import Replica, average
from tests.pool import Pool
from tests.small_model import norm_model


class Mixed(nn.Module):
    """Something to train, something frozen, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.tensor(5))


def test_what_is_trained_what_is_averaged_and_what_stays() -> None:
    replica = Replica(Mixed(), Cuts())
    assert replica.layout.names == ["weight"]
    assert replica.buffers.names == ["running"]
    assert [name for name, _ in replica.frozen] == ["frozen"]


def test_local_values_come_back_after_the_consensus() -> None:
    model = Mixed()
    replica = Replica(model, Cuts())
    replica.keep_local()
    assert replica.shows_consensus
    model.weight.data.zero_()
    model.running.fill_(9.0)
    params, buffers = replica.local()
    assert params.tolist() == list(range(6))  # whatever the module shows
    assert buffers.tolist() == [0, 0]
    replica.show_local()
    assert not replica.shows_consensus
    assert model.weight.flatten().tolist() == list(range(6))
    assert model.running.tolist() == [0, 0]
    model.weight.data.fill_(3.0)
    replica.show_local()  # a second call does nothing
    assert model.weight.flatten().tolist() == [3.0] * 6


def test_values_that_are_set_are_local_ones() -> None:
    model = Mixed()
    replica = Replica(model, Cuts(4))
    replica.keep_local()
    replica.set_local(torch.full((6,), 2.0), torch.ones(2))
    assert not replica.shows_consensus
    assert model.weight.flatten().tolist() == [2.0] * 6
    assert model.running.tolist() == [1.0, 1.0]


def test_some_parameters_only_are_exchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    replica = Replica(model, Cuts(), model[1].parameters())
    assert replica.layout.names == ["1.weight", "1.bias"]
    assert [name for name, _ in replica.left_out] == ["0.weight", "0.bias"]


def test_buffers_that_are_replaced_or_resized_are_found() -> None:
    model = Mixed()
    replica = Replica(model, Cuts())
    model.running = torch.ones(2)
    assert replica.buffers.tensors[0] is model.running
    model.running = torch.ones(3)
    assert replica.buffers.new_flat().tolist() == [1.0] * 3
    model.running.resize_(1)
    assert replica.buffers.new_flat().tolist() == [1.0]
    model.running = None
    assert replica.buffers.names == ["running"]


def test_buffers_that_are_resized_while_the_consensus_is_shown_stay_as_they_are() -> None:
    model = Mixed()
    replica = Replica(model, Cuts())
    replica.keep_local()
    model.weight.data.zero_()
    model.running.resize_(4).fill_(9.0)
    replica.show_local()
    assert model.weight.flatten().tolist() == list(range(6))
    assert model.running.tolist() == [9.0] * 4


def test_a_sample_is_of_at_most_so_many_elements_and_shifts(subtests: pytest.Subtests) -> None:
    for most, length in ((6, 6), (3, 3), (1, 1), (100, 6)):
        with subtests.test(most=most):
            replica = Replica(Mixed(), Cuts())
            seen = [replica.sample(most, index) for index in range(12)]
            assert {len(sample) for sample in seen} == {length}
            assert {value for sample in seen for value in sample.tolist()} == set(range(6))
            assert seen[0].dtype == torch.float64


def mean(rank: int, world: int, valid: list[bool]) -> tuple[Tensor, int]:
    model = norm_model(seed=0)
    for value in model.parameters():
        value.data.fill_(float(rank) if valid[rank] else torch.nan)
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    layout = Replica(model, Cuts(4)).layout
    assert len(layout.chunks()) > 2
    average(layout, group, statistics, valid[rank], sum(valid))
    group.close()
    return layout.new_flat(), statistics.bytes_sent


@pytest.mark.parametrize("valid", [[True] * 3, [True, False, True], [False, False, True]], ids=str)
def test_an_average_is_over_the_valid_workers(pool: Pool, valid: list[bool]) -> None:
    own = [rank for rank in range(3) if valid[rank]]
    for values, sent in pool.run(mean, valid, world=3):
        assert values.tolist() == [sum(own) / len(own)] * values.numel()
        assert sent > 0
