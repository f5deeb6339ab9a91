"""The expected loss: its coefficients fit the table of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published import CHARLES
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.tools.plan.loss import (
    EXPONENT,
    FITTED_PARAMETERS,
    OFFSET,
    PERCENT_OF_DELAY,
    PERCENT_OF_FIT,
    SLOPE,
    LossGap,
    diloco_gap,
)

WORKERS = (1, 2, 4, 8)
ROWS = [
    (parameters, workers, diloco / ddp)
    for parameters, (ddp, *losses) in CHARLES.items()
    for workers, diloco in zip(WORKERS, losses, strict=False)
]
FITTED = [row for row in ROWS if row[0] <= FITTED_PARAMETERS[1]]


def gap(parameters: float, workers: int, every: int = 30, tokens: float = 20) -> LossGap:
    found = diloco_gap(parameters, workers, every, tokens)
    assert found is not None
    return found


def test_the_coefficients_are_those_of_least_squares() -> None:
    parameters, workers, ratios = np.array(FITTED).T

    def fit(exponent: float) -> tuple[float, np.ndarray]:
        drift = np.log(workers) * (parameters / 1e9) ** -exponent
        inputs = np.stack([np.ones_like(drift), drift], axis=1)
        found, squares, *_ = np.linalg.lstsq(inputs, np.log(ratios), rcond=None)
        return float(squares[0]), found

    exponents = np.linspace(0.2, 0.3, 101)
    best = min(exponents, key=lambda one: fit(one)[0])
    assert best == pytest.approx(EXPONENT)
    squares, found = fit(best)
    assert found == pytest.approx([OFFSET, SLOPE], rel=1e-3)
    deviation = 100 * (squares / (len(FITTED) - 3)) ** 0.5
    assert pytest.approx(2 * deviation, rel=0.01) == PERCENT_OF_FIT


def test_the_range_holds_the_losses_of_the_paper() -> None:
    for parameters, workers, ratio in ROWS:
        found = gap(parameters, workers)
        assert found.low <= 100 * (ratio - 1) <= found.high
        assert (found.outside == ()) == (parameters <= FITTED_PARAMETERS[1])


def test_the_range_holds_what_the_benchmark_has_shown() -> None:
    """DiLoCo with 4 workers, 0.2M parameters and 10 local steps per round."""
    found = gap(0.17e6, 4, 10)
    assert found.low < METHOD_TABLE["diloco"].gaps[""] < found.high
    assert len(found.outside) == 2


def test_extrapolations_are_marked_and_widen_the_range(subtests: pytest.Subtests) -> None:
    inside = gap(1e9, 8)
    for arguments, name in (
        ((10e9, 8), "number of parameters"),
        ((1e9, 64), "number of workers"),
        ((1e9, 8, 300), "local steps per round"),
    ):
        with subtests.test(name):
            outside = gap(*arguments)
            assert name in str(outside.outside)
            assert str(outside).endswith("*")
            assert outside.high - outside.low > inside.high - inside.low
    assert "tokens per parameter" in str(gap(1e9, 8, tokens=200).outside)


def test_nothing_is_lost_by_more_rounds_and_more_by_fewer() -> None:
    percents = [gap(1e9, 8, every).percent for every in (1, 10, 30, 100, 500)]
    assert percents == sorted(percents)
    assert gap(1e9, 8, 1).percent == pytest.approx(gap(1e9, 1).percent)


def test_a_short_delay_widens_the_range_and_a_long_one_is_not_known() -> None:
    short = diloco_gap(1e9, 8, 30, 20, delay=10)
    assert short is not None
    assert short.high == pytest.approx(gap(1e9, 8).high + PERCENT_OF_DELAY)
    assert diloco_gap(1e9, 8, 30, 20, delay=11) is None
