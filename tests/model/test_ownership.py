"""The elements that each rank of a worker owns."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.ownership import Block, divide, find_ownership


@pytest.mark.parametrize(
    ("offset", "local"),
    [
        ((0, 0, 0), (3, 4, 5)),
        ((1, 0, 2), (2, 4, 1)),
        ((2, 1, 0), (1, 2, 5)),
        ((3, 0, 0), (0, 4, 5)),
    ],
)
def test_elements_before_a_position_are_counted_row_by_row(
    offset: tuple[int, ...], local: tuple[int, ...]
) -> None:
    shape = (3, 4, 5)
    whole = torch.arange(math.prod(shape)).view(shape)
    held = whole
    for dim, (start, length) in enumerate(zip(offset, local, strict=True)):
        held = held.narrow(dim, start, length)
    block = Block(shape, offset, local)
    for position in range(math.prod(shape) + 1):
        assert block.elements_before(position) == int((held < position).sum())


def test_a_scalar_has_one_element() -> None:
    assert [Block((), (), ()).elements_before(position) for position in (0, 1)] == [0, 1]


def test_parts_are_about_equal_and_cover_each_element_once() -> None:
    slices = [range(0, 10), range(13, 14), range(20, 57)]
    elements = list(itertools.chain(*slices))
    for num_parts, granularity in itertools.product((1, 2, 3, 8), (1, 4, 7)):
        parts = list(divide(slices, num_parts, granularity))
        assert sorted(itertools.chain(*itertools.chain(*parts))) == elements
        starts = {part.start for each in parts for part in each}
        for start in starts:
            (within,) = (each for each in slices if start in each)
            assert (start - within.start) % granularity == 0
        longest = max(sum(map(len, part)) for part in parts)
        assert longest <= math.ceil(len(elements) / num_parts) + granularity - 1
        assert parts[0]
    assert list(divide(slices, 2, None)) == [slices, []]
    assert list(divide([range(4, 5)], 2, 1)) == [[range(4, 5)], []]


def test_a_worker_of_one_rank_owns_all() -> None:
    named = {"a": torch.zeros(3, 2), "b": torch.zeros(4)}
    ownership = find_ownership(named, [[range(0, 5)], [range(5, 10)]], 1, WorkerGroup(0, 3))
    assert ownership.fragments == [[range(0, 5)], [range(5, 10)]]
    assert ownership.fragment_slices() == ownership.fragments
    assert ownership.boundaries == (5, 10)
    assert not ownership.shared
