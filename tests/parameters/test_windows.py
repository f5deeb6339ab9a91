"""Windows: a chunk and its place in a vector, which may be on another device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco.parameters.flat import Chunk, Cuts, DistantWindow, FlatLayout, Window
from tests.meta_device import DEVICE, copies_to_the_host


def test_the_pairs_of_a_window_are_all_there() -> None:
    views = [torch.ones(2), torch.ones(3).bfloat16(), torch.ones(4)]
    for chunk in (Chunk(0, views), Chunk(0, views[::2])):
        numbers = torch.arange(float(len(chunk)))
        pairs = list(chunk.window(numbers).pairs())
        assert sorted(len(view) for view, _ in pairs) == sorted(map(len, chunk.views))
        assert all(len(view) == len(part) for view, part in pairs)
        assert sorted(torch.cat([part for _, part in pairs]).tolist()) == numbers.tolist()


def test_a_distant_window_copies_as_a_near_one_does() -> None:
    torch.manual_seed(0)
    views = [torch.randn(2, 3), torch.randn(5).bfloat16(), torch.randn(4).double()]
    chunk, near, distant = Chunk(0, views), torch.empty(15), torch.empty(15)
    chunk.window(near).pack()
    DistantWindow(chunk, distant).pack()
    assert torch.equal(distant, near)
    DistantWindow(chunk, near * 2).unpack()
    chunk.pack(distant)
    assert torch.equal(distant, near * 2)


def test_a_chunk_is_tied_by_where_the_vector_is() -> None:
    chunk = Chunk(0, [torch.empty(2, 3, device=DEVICE)])
    assert isinstance(chunk.tied(torch.empty(6, device=DEVICE)), Window)
    window = chunk.tied(torch.empty(6))
    assert isinstance(window, DistantWindow)
    with copies_to_the_host():
        window.pack()
    window.unpack()


def test_a_layout_may_have_its_vectors_on_another_device() -> None:
    model = nn.Linear(30, 40).to(DEVICE)
    layout = FlatLayout(model.named_parameters(), Cuts(100), torch.device("cpu"))
    with copies_to_the_host():
        vector = layout.new_flat()
        assert vector.device.type == layout.set_aside().device.type == "cpu"
    layout.write(vector)
    layout.write(vector.to(DEVICE))
    assert layout.every(7, 3).device == DEVICE
    assert {p.device for p in model.parameters()} == {DEVICE}


@pytest.mark.gpu
def test_messages_of_a_gpu_are_pinned_in_the_hosts_memory() -> None:
    model = nn.Linear(30, 40).cuda()
    layout = FlatLayout(model.named_parameters(), Cuts(100), torch.device("cpu"))
    assert layout.empty(10).is_pinned()
    assert torch.equal(layout.new_flat(), FlatLayout(model.named_parameters()).new_flat().cpu())
