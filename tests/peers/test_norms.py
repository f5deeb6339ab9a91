"""Norms that are taken block by block are those of the whole vector."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_loco.peers.norms import copy_with_norm, norm_of

LARGE = 3 * 2**17 + 5


def test_the_norm_is_that_of_the_whole(subtests: pytest.Subtests) -> None:
    for numel, dtype in itertools.product((1, 2**17, LARGE), (torch.float32, torch.float64)):
        with subtests.test(numel=numel, dtype=dtype):
            values = torch.randn(numel, dtype=dtype)
            copy = torch.empty_like(values)
            expected = values.double().norm().item()
            assert norm_of(values) == pytest.approx(expected, rel=1e-5)
            assert copy_with_norm(values, copy) == norm_of(values)
            assert torch.equal(copy, values)


def test_the_norm_is_that_of_what_was_copied() -> None:
    values = torch.tensor([3.0 + 2**-40, 4.0], dtype=torch.float64)
    assert copy_with_norm(values, torch.empty(2)) == 5


def test_what_is_not_finite_or_absurd_has_no_finite_norm(subtests: pytest.Subtests) -> None:
    for value, place in itertools.product((math.inf, -math.inf, math.nan, 3e38), (0, -1)):
        with subtests.test(value=value, place=place):
            values = torch.ones(LARGE)
            values[place] = value
            assert not math.isfinite(norm_of(values))
            assert not math.isfinite(copy_with_norm(values, torch.empty_like(values)))
