"""Pairwise averaging: factors, the threshold, exact limits, clocks, and the mean."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import (
    Constant,
    PairwiseAverage,
    Tag,
    by_clock,
    by_loss,
)

NAN, INF = math.nan, math.inf


def test_factors(subtests: pytest.Subtests) -> None:
    rows: list[tuple[str, tuple[float, float], tuple[float, float], float]] = [
        ("constant", (1, 1.0), (9, 9.0), 0.3),
        ("clock", (10, 1.0), (30, 1.0), 0.75),
        ("clock", (30, 1.0), (10, 1.0), 0.25),
        ("clock", (0, 1.0), (5, 1.0), 1.0),
        ("clock", (0, 1.0), (0, 1.0), 0.5),
        ("loss", (1, 3.0), (1, 1.0), 0.75),  # the worse model moves more
        ("loss", (1, 1.0), (1, 3.0), 0.25),
        ("loss", (1, 0.0), (1, 2.0), 0.0),
        ("loss", (1, 2.0), (1, 0.0), 1.0),
        ("loss", (1, 0.0), (1, 0.0), 0.5),
        ("loss", (1, -1.0), (1, 0.5), 1.0),  # 2 before clamping
        ("loss", (1, 0.5), (1, -1.0), 0.0),  # -1 before clamping
        ("loss", (1, 1.0), (1, -1.0), 0.5),  # 1/0
        ("loss", (1, NAN), (1, 1.0), 0.0),
        ("loss", (1, INF), (1, 1.0), 0.0),
        ("constant", (1, 1.0), (1, NAN), 0.0),
        ("constant", (1, 1.0), (INF, 1.0), 0.0),
        ("clock", (1, 1.0), (NAN, 1.0), 0.0),
    ]
    for interpolation, own, peer, expected in rows:
        with subtests.test(interpolation, own=own, peer=peer):
            average = PairwiseAverage(interpolation=interpolation, factor=0.3)
            assert average.blend_factor(Tag(*own), Tag(*peer)) == expected


def test_uses_loss(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"interpolation": "clock"}, False),
        ({"interpolation": by_clock}, False),
        ({"interpolation": Constant(0.3)}, False),
        ({"interpolation": "loss"}, True),
        ({"interpolation": by_loss}, True),
        ({"interpolation": lambda *_: 0.5}, True),  # a callable may use them
        ({"divergence_threshold": 0.1}, True),
    ]
    for settings, expected in rows:
        with subtests.test(str(settings)):
            assert PairwiseAverage(**settings).uses_loss == expected


def test_callable_gets_clocks_and_losses_and_its_result_is_clamped() -> None:
    seen = []

    def rule(clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
        seen.append((clock, peer_clock, loss, peer_loss))
        return len(seen) - 2.0

    average = PairwiseAverage(interpolation=rule)
    factors = [average.blend_factor(Tag(1, 2.0), Tag(3, 4.0)) for _ in range(4)]
    assert seen == [(1, 3, 2.0, 4.0)] * 4
    assert factors == [0.0, 0.0, 1.0, 1.0]
    broken = PairwiseAverage(interpolation=lambda *_: NAN)
    assert broken.blend_factor(Tag(1, 2.0), Tag(3, 4.0)) == 0.0


def test_worker_below_the_threshold_moves_less(subtests: pytest.Subtests) -> None:
    average = PairwiseAverage(factor=0.8, divergence_threshold=0.4)
    expected = {0.2: 0.4, 0.4: 0.8, 0.39: 0.78, 0.1: 0.2, 0.0: 0.0, -3.0: 0.0, 5.0: 0.8}
    for loss, factor in expected.items():
        with subtests.test(loss=loss):
            found = average.blend_factor(Tag(1, loss), Tag(1, 1.0))
            assert found == pytest.approx(factor, abs=1e-15)


@pytest.mark.parametrize("loss", [-1.0, 0.0, 1e-9])
def test_threshold_zero_has_no_effect(loss: float) -> None:
    assert PairwiseAverage(factor=0.8).blend_factor(Tag(1, loss), Tag(1, 1.0)) == 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors_zero_and_one_are_exact_for_any_values(
    dtype: torch.dtype,
) -> None:
    average = PairwiseAverage()
    odd = torch.tensor([NAN, INF, -INF, -0.0, 1e-40], dtype=dtype)
    fine = torch.tensor([1.0, -0.0, 3.0, 4.0, 5e-40], dtype=dtype)
    for params, received in ((fine, odd), (odd, fine)):
        kept = params.clone()
        average.blend(kept, received, 0.0)
        assert_same_bits(kept, params)
        average.blend(kept, received, 1.0)
        assert_same_bits(kept, received)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.view(torch.uint8).tolist() == b.view(torch.uint8).tolist()


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.9])
def test_parameters_and_clocks_are_averaged_with_the_same_factor(factor: float) -> None:
    average = PairwiseAverage()
    own, peer = torch.randn(2, 50, dtype=torch.float64)
    params = own.clone()
    average.blend(params, peer, factor)
    torch.testing.assert_close(params, factor * peer + (1 - factor) * own, rtol=0, atol=1e-15)
    clock = average.blended_clock(10, 30, factor)
    assert clock == pytest.approx(10 + 20 * factor)


def test_clock_is_exact_for_factors_zero_and_one() -> None:
    average = PairwiseAverage()
    assert average.blended_clock(0.1, INF, 0.0) == 0.1
    assert average.blended_clock(INF, 0.1, 1.0) == 0.1


def test_simultaneous_blends_keep_the_mean_and_one_sided_ones_do_not() -> None:
    average = PairwiseAverage()
    a, b = torch.randn(2, 50, dtype=torch.float64)
    mean = (a + b) / 2
    both = a.clone(), b.clone()
    average.blend(both[0], b, 0.5)
    average.blend(both[1], a, 0.5)
    torch.testing.assert_close((both[0] + both[1]) / 2, mean, rtol=0, atol=1e-15)
    one_sided = a.clone()
    average.blend(one_sided, b, 0.5)
    assert ((one_sided + b) / 2 - mean).abs().max() > 0.1


def test_gossip_without_gradients_reaches_consensus() -> None:
    average = PairwiseAverage()
    params = torch.randn(4, 30, dtype=torch.float64)
    spread = params.std(dim=0).norm()
    choice = torch.Generator().manual_seed(0)
    for _ in range(100):
        worker, shift = (
            torch.randint(0, 4, (1,), generator=choice),
            torch.randint(1, 4, (1,), generator=choice),
        )
        average.blend(params[worker.item()], params[(worker + shift).item() % 4].clone(), 0.5)
    assert params.std(dim=0).norm() < 1e-3 * spread


def test_errors_name_the_invalid_setting(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"fetch_probability": 1.1}, ValueError, r"in \[0, 1\], got 1.1"),
        ({"fetch_probability": NAN}, ValueError, "fetch_probability"),
        ({"factor": -0.1}, ValueError, "peer's share"),
        ({"factor": "half"}, TypeError, "must be a number"),
        ({"factor": True}, TypeError, "must be a number"),
        ({"divergence_threshold": -1}, ValueError, "Use 0 to turn it off"),
        ({"divergence_threshold": INF}, ValueError, "finite"),
        ({"interpolation": "los"}, ValueError, "'constant', 'clock' or 'loss', got 'los'"),
        ({"interpolation": 0.5}, TypeError, "factor=0.5"),
    ]
    for settings, error, message in rows:
        with subtests.test(str(settings)), pytest.raises(error, match=message):
            PairwiseAverage(**settings)


def test_algorithm_is_frozen_and_picklable(subtests: pytest.Subtests) -> None:
    for interpolation in ("loss", by_clock, by_loss, Constant(0.2)):
        with subtests.test(str(interpolation)):
            average = PairwiseAverage(interpolation=interpolation)
            assert pickle.loads(pickle.dumps(average)) == average
            with pytest.raises(dataclasses.FrozenInstanceError):
                average.factor = 0.1  # type: ignore[misc]
