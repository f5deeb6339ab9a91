"""Averaging: the tensors that are served, and the exact result of a blend."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.algorithms.pairwise_average import PairwiseAverage
from lightning_loco.gossip.averaging import ModelAverager, copy_model, served_layout
from lightning_loco.model.flat import Cuts, FlatLayout

SHAPES = ((3, 4), (5,), (2, 2, 2))
NUMEL = 25


def make(
    algorithm: PairwiseAverage | None = None,
    dtype: torch.dtype = torch.float64,
    chunk_elements: int | None = None,
) -> tuple[ModelAverager, list[Tensor]]:
    """Return an averager of three tensors that hold 0, 1, 2, ..., and the tensors."""
    values = torch.arange(NUMEL, dtype=dtype).split([math.prod(shape) for shape in SHAPES])
    tensors = [part.clone().view(shape) for part, shape in zip(values, SHAPES, strict=True)]
    layout = FlatLayout(zip("abc", tensors, strict=True), Cuts(chunk_elements))
    return ModelAverager(layout, algorithm or PairwiseAverage(keep_progress=False), NUMEL), tensors


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


START = torch.arange(NUMEL, dtype=torch.float64)
THEIRS = torch.linspace(-3, 40, NUMEL, dtype=torch.float64)


def test_parameters_and_floating_point_buffers_are_served() -> None:
    model = nn.BatchNorm1d(3)
    params = FlatLayout(model.named_parameters())
    buffers = FlatLayout((n, b) for n, b in model.named_buffers() if b.is_floating_point())
    layout = served_layout(params, buffers, 4)
    assert layout.names == ["weight", "bias", "buffer running_mean", "buffer running_var"]
    assert layout.numel == 12
    assert [len(chunk) for chunk in layout.chunks()] == [4, 4, 4]
    assert layout.new_flat().tolist() == [1.0] * 3 + [0.0] * 6 + [1.0] * 3


@pytest.mark.parametrize("chunk_elements", [None, 7, 1])
def test_copy_model_copies_the_tensors(chunk_elements: int | None) -> None:
    averager, tensors = make(chunk_elements=chunk_elements)
    packed = torch.empty(NUMEL, dtype=torch.float64)
    copy_model(averager.layout, packed)
    assert torch.equal(packed, START)
    packed.zero_()
    assert torch.equal(flat(tensors), START)


def test_blend_interpolates_by_the_factor(subtests: pytest.Subtests) -> None:
    for factor, chunk_elements in itertools.product((0.0, 0.25, 0.5, 1.0), (None, 7, 1)):
        with subtests.test(factor=factor, chunk_elements=chunk_elements):
            averager, tensors = make(chunk_elements=chunk_elements)
            theirs = THEIRS.clone()
            averager.blend(theirs, factor, was_finite=True)
            expected = factor * THEIRS + (1 - factor) * START
            torch.testing.assert_close(flat(tensors), expected, rtol=0, atol=1e-14)
            if factor in (0, 1):
                assert torch.equal(flat(tensors), THEIRS if factor else START)
            assert torch.equal(theirs, THEIRS)


def test_narrow_parameters_are_blended_in_float32_and_rounded_once() -> None:
    averager, tensors = make(dtype=torch.bfloat16, chunk_elements=7)
    start, theirs = flat(tensors).float(), THEIRS.float()
    averager.blend(theirs, 0.3, was_finite=True)
    assert torch.equal(flat(tensors), start.lerp(theirs, 0.3).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_keep_progress_keeps_the_steps_made_during_the_fetch(dtype: torch.dtype) -> None:
    averager, tensors = make(PairwiseAverage(keep_progress=True), dtype, chunk_elements=7)
    for _ in range(2):  # every fetch starts from new values
        start = flat(tensors)
        averager.record_fetch_start()
        for tensor in tensors:
            tensor.add_(8)
        averager.blend(torch.zeros(NUMEL, dtype=averager.layout.dtype), 0.5, was_finite=True)
        torch.testing.assert_close(flat(tensors), start / 2 + 8)


@pytest.mark.parametrize("chunk_elements", [None, 7, 1])
def test_buffers_are_averaged_as_they_are(chunk_elements: int | None) -> None:
    """A variance that fell during the fetch stays positive: buffers have no progress to keep."""
    model = nn.BatchNorm1d(5)
    params = FlatLayout(model.named_parameters())
    buffers = FlatLayout((n, b) for n, b in model.named_buffers() if b.is_floating_point())
    layout = served_layout(params, buffers, chunk_elements or 100)
    averager = ModelAverager(layout, PairwiseAverage(), params.numel)
    theirs = torch.full((layout.numel,), 0.25)
    with torch.no_grad():
        averager.record_fetch_start()  # weights and variances are 1
        model.weight -= 0.75
        model.running_var.fill_(0.125)
        averager.blend(theirs, 0.5, was_finite=True)
    assert model.weight.tolist() == [0.5 * 1 + 0.5 * 0.25 - 0.75] * 5
    assert model.running_var.tolist() == [0.5 * 0.125 + 0.5 * 0.25] * 5


def test_present_model_is_blended_without_keep_progress() -> None:
    averager, tensors = make()
    averager.record_fetch_start()
    for tensor in tensors:
        tensor.add_(8)
    averager.blend(torch.zeros(NUMEL, dtype=torch.float64), 0.5, was_finite=True)
    torch.testing.assert_close(flat(tensors), (START + 8) / 2)


@pytest.mark.parametrize("keep_progress", [False, True])
def test_model_that_was_not_finite_is_replaced_by_the_peers(keep_progress: bool) -> None:
    averager, tensors = make(PairwiseAverage(keep_progress=keep_progress))
    tensors[1][2] = math.nan
    averager.record_fetch_start()
    averager.blend(THEIRS, 1.0, was_finite=False)
    assert torch.equal(flat(tensors), THEIRS)


def test_blend_finds_parameters_whose_memory_has_moved() -> None:
    averager, tensors = make()
    tensors[0].data = tensors[0] + 1
    averager.blend(THEIRS, 1.0, was_finite=True)
    assert torch.equal(flat(tensors), THEIRS)
