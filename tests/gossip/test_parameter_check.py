"""The check of received parameters: finite, and not much larger than the worker's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.fetch_decisions import ParameterCheck
from lightning_loco.gossip.protocol import WireFormat
from lightning_loco.gossip.snapshots import Snapshots

NUMEL = 65_380


def make(own: Tensor | None = None) -> ParameterCheck:
    snapshots = Snapshots(WireFormat(1, NUMEL, torch.float32))
    if own is not None:
        snapshots.publish(own, Tag(1, 1))
    return ParameterCheck(NUMEL, snapshots)


def accepts(check: ParameterCheck, theirs: Tensor, chunk: int = 50_000) -> bool:
    """Check parameters in chunks, as a fetch does."""
    check.reset()
    for start in range(0, len(theirs), chunk):
        check.update(theirs[start : start + chunk])
    return check.is_finite and check.norm <= check.max_norm


def test_the_norm_is_that_of_all_values(subtests: pytest.Subtests) -> None:
    for dtype, chunk in itertools.product((torch.float32, torch.float64), (100, 50_000, NUMEL)):
        with subtests.test(dtype=dtype, chunk=chunk):
            check, theirs = make(), torch.randn(NUMEL, dtype=dtype)
            assert accepts(check, theirs, chunk)
            assert check.norm == pytest.approx(float(theirs.norm()), rel=1e-5)


def test_one_value_that_is_not_finite_is_detected(subtests: pytest.Subtests) -> None:
    check = make()
    for value, position in itertools.product((math.nan, math.inf, -math.inf), (0, 60_000)):
        with subtests.test(value=value, position=position):
            theirs = torch.zeros(NUMEL)
            theirs[position] = value
            assert not accepts(check, theirs)
            assert not check.is_finite
            assert accepts(check, torch.zeros(NUMEL))


def test_the_bound_is_ten_times_the_own_norm_or_that_of_ones(subtests: pytest.Subtests) -> None:
    for scale in (None, 0.0, 0.01, 1.0, 100.0):
        with subtests.test(scale=scale):
            check = make(None if scale is None else torch.full((NUMEL,), scale))
            bound = 1e9 if scale is None else 10 * max(scale, 1.0)
            assert accepts(check, torch.full((NUMEL,), -0.99 * bound))
            assert not accepts(check, torch.full((NUMEL,), 1.01 * bound))
            assert check.is_finite


def test_values_whose_squares_overflow_are_too_large_and_finite() -> None:
    check = make(torch.ones(NUMEL))
    assert not accepts(check, torch.full((NUMEL,), 3e38))
    assert check.is_finite
