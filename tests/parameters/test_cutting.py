"""Cutting: every element is in one stretch, and stretches begin and end where they may."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_loco.parameters.cutting import stretches

SIZES = (5, 1, 12, 3, 7)


def tensors() -> list[tuple[str, torch.Tensor]]:
    parts = torch.arange(float(sum(SIZES))).split(SIZES)
    return [(str(number), part) for number, part in enumerate(parts)]


def test_everything_is_in_one_stretch(subtests: pytest.Subtests) -> None:
    rows = itertools.product((1, 3, 8, 100), (1, 2, 4), ((), (8,), (8, 20)))
    for longest, granularity, boundaries in rows:
        with subtests.test(longest=longest, granularity=granularity, boundaries=boundaries):
            found = list(stretches(tensors(), longest, granularity, boundaries))
            starts = [start for start, _ in found]
            joined = [torch.cat(views) for _, views in found]
            assert torch.cat(joined).tolist() == list(range(sum(SIZES)))
            assert starts == [int(values[0]) for values in joined]
            assert all(start % granularity == 0 for start in starts)
            assert set(boundaries) <= set(starts)
            assert max(map(len, joined)) <= max(longest, granularity)


def test_a_tensor_with_gaps_stays_whole() -> None:
    gaps = torch.arange(12.0).view(4, 3)[:, :2]
    found = list(stretches([("a", torch.zeros(3)), ("gaps", gaps)], longest=4))
    assert [(start, [view.shape for view in views]) for start, views in found] == [
        (0, [(3,)]),
        (3, [(4, 2)]),
    ]
    with pytest.raises(ValueError, match="'gaps' has gaps in memory and cannot be cut"):
        list(stretches([("gaps", gaps)], longest=4, boundaries=(2,)))
