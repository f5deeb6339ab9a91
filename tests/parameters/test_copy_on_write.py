"""Copies that rounds work on while gradients are computed from the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_loco.parameters.copy_on_write import CopyOnWrite
from lightning_loco.parameters.flat import Cuts, FlatLayout


def make_layout(*tensors: Tensor, chunk_elements: int = 4) -> FlatLayout:
    named = [(f"p{index}", tensor) for index, tensor in enumerate(tensors)]
    return FlatLayout(named, Cuts(chunk_elements))


def write(layout: FlatLayout, change: float) -> None:
    """What a round does."""
    if layout.before_write is not None:
        layout.before_write()
    layout.write(layout.new_flat() + change)


def test_without_a_round_nothing_is_copied() -> None:
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
def test_parameters_stay_until_the_end_of_the_step_and_then_both_count(dtype: torch.dtype) -> None:
    weight = torch.arange(6.0, dtype=dtype).reshape(2, 3)
    layout = make_layout(weight, torch.ones(2, dtype=dtype))
    cut = layout.chunks()
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
    assert layout.cut is not cut  # who is tied to the copies must notice
    write(layout, 1.0)
    assert torch.equal(weight.double(), torch.arange(6.0).reshape(2, 3).double() + 12)


def test_backward_works_after_a_round_in_between() -> None:
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


def test_strides_and_cuts_stay() -> None:
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
