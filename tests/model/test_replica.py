"""A replica: local parameters and buffers, replaced by the consensus and restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.model.flat import Cuts, FlatLayout
from lightning_loco.model.replica import CopyOnWrite, ParameterOwners, Replica


class Mixed(nn.Module):
    """A trained and a frozen parameter, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.tensor(5))


def test_parameters_and_buffers_of_a_replica() -> None:
    replica = Replica(Mixed(), Cuts())
    assert replica.layout.names == ["weight"]
    assert replica.buffers.names == ["running"]
    assert [name for name, _ in replica.frozen] == ["frozen"]


def test_local_values_are_restored_after_the_consensus() -> None:
    model = Mixed()
    replica = Replica(model, Cuts())
    replica.keep_local()
    assert replica.shows_consensus
    model.weight.data.zero_()
    model.running.fill_(9.0)
    params, buffers = replica.local()
    assert params.tolist() == list(range(6))  # not the value in the module
    assert buffers.tolist() == [0, 0]
    replica.show_local()
    assert not replica.shows_consensus
    assert model.weight.flatten().tolist() == list(range(6))
    assert model.running.tolist() == [0, 0]
    model.weight.data.fill_(3.0)
    replica.show_local()  # a second call does nothing
    assert model.weight.flatten().tolist() == [3.0] * 6


def test_set_local_replaces_the_consensus() -> None:
    model = Mixed()
    replica = Replica(model, Cuts(4))
    replica.keep_local()
    replica.set_local(torch.full((6,), 2.0), torch.ones(2))
    assert not replica.shows_consensus
    assert model.weight.flatten().tolist() == [2.0] * 6
    assert model.running.tolist() == [1.0, 1.0]


def test_only_some_parameters_are_exchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    replica = Replica(model, Cuts(), model[1].parameters())
    assert replica.layout.names == ["1.weight", "1.bias"]
    assert [name for name, _ in replica.left_out] == ["0.weight", "0.bias"]


def test_replaced_or_resized_buffers_are_found() -> None:
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


def test_buffers_that_are_resized_while_the_consensus_is_shown_are_not_restored() -> None:
    model = Mixed()
    replica = Replica(model, Cuts())
    replica.keep_local()
    model.weight.data.zero_()
    model.running.resize_(4).fill_(9.0)
    replica.show_local()
    assert model.weight.flatten().tolist() == list(range(6))
    assert model.running.tolist() == [9.0] * 4


def test_a_sample_is_limited_and_differs_between_rounds(subtests: pytest.Subtests) -> None:
    for most, length in ((6, 6), (3, 3), (1, 1), (100, 6)):
        with subtests.test(most=most):
            replica = Replica(Mixed(), Cuts())
            seen = [replica.sample(most, index) for index in range(12)]
            assert {len(sample) for sample in seen} == {length}
            assert {value for sample in seen for value in sample.tolist()} == set(range(6))
            assert seen[0].dtype == torch.float64


def test_a_moved_parameter_is_found_and_a_replaced_one_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[1].weight
    owners = ParameterOwners(model, ["1.weight"], [weight])
    assert owners.slots == [(model[1], "weight", weight)]
    del model[1].weight
    model[0].other = weight
    owners.check()
    assert owners.slots == [(model[0], "other", weight)]
    model[0].other = nn.Parameter(weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"Parameter '1.weight' was replaced by another object"):
        owners.check()


def make_layout(*tensors: Tensor, chunk_elements: int = 4) -> FlatLayout:
    named = [(f"p{index}", tensor) for index, tensor in enumerate(tensors)]
    return FlatLayout(named, Cuts(chunk_elements))


def write(layout: FlatLayout, change: float) -> None:
    """Change the parameters as a round does."""
    if layout.before_write is not None:
        layout.before_write()
    layout.write(layout.new_flat() + change)


def test_copy_on_write_without_a_round_copies_nothing() -> None:
    weight = torch.arange(6.0)
    layout = make_layout(weight)
    copy_on_write = CopyOnWrite(layout)
    copy_on_write.hold()
    copy_on_write.hold()
    copy_on_write.release()
    assert layout.tensors[0] is weight
    assert layout.before_write is None
    copy_on_write.release()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_copy_on_write_applies_the_round_after_the_optimizer_step(dtype: torch.dtype) -> None:
    weight = torch.arange(6.0, dtype=dtype).reshape(2, 3)
    layout = make_layout(weight, torch.ones(2, dtype=dtype))
    chunks = layout.chunks()
    copy_on_write = CopyOnWrite(layout)
    copy_on_write.hold()
    write(layout, 10.0)
    write(layout, 2.0)
    assert torch.equal(weight, torch.arange(6.0, dtype=dtype).reshape(2, 3))
    assert torch.equal(layout.new_flat()[:6].double(), torch.arange(6.0).double() + 12)
    weight.sub_(1.0)  # the optimizer's step
    copy_on_write.release()
    assert torch.equal(weight.double(), torch.arange(6.0).reshape(2, 3).double() + 11)
    assert layout.tensors[0] is weight
    assert layout.chunks() is not chunks  # users of the copies must be able to detect it
    write(layout, 1.0)
    assert torch.equal(weight.double(), torch.arange(6.0).reshape(2, 3).double() + 12)


def test_copy_on_write_allows_a_round_before_backward() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    layout = make_layout(weight)
    copy_on_write = CopyOnWrite(layout)
    copy_on_write.hold()
    loss = (weight.square() * weight).sum()
    write(layout, 5.0)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 3.0))
    copy_on_write.release()
    assert torch.equal(weight.detach(), torch.full((3,), 6.0))


def test_copy_on_write_keeps_strides_and_chunks() -> None:
    gaps = torch.arange(12.0).reshape(3, 4)[:, :2]
    turned = torch.arange(6.0).reshape(2, 3).t()
    layout = make_layout(gaps, turned)
    before = [(chunk.start, chunk.stop) for chunk in layout.chunks()]
    flat = layout.new_flat()
    copy_on_write = CopyOnWrite(layout)
    copy_on_write.hold()
    write(layout, 0.0)
    assert [(chunk.start, chunk.stop) for chunk in layout.chunks()] == before
    assert torch.equal(layout.new_flat(), flat)
    copy_on_write.release()
    assert torch.equal(layout.new_flat(), flat)
