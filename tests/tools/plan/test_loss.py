"""The expected loss: its coefficients fit the table of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_loco.tools.plan.loss import (
    EXPONENT,
    OFFSET,
    PERCENT_OF_DELAY,
    PERCENT_OF_FIT,
    SLOPE,
    LossGap,
    diloco_gap,
)

WORKERS = (1, 2, 4, 8)
LOSSES = {  # Charles et al., Table 4: parameters, loss of DDP, losses of DiLoCo by workers
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
}
ROWS = [
    (parameters, workers, diloco / ddp)
    for parameters, (ddp, *losses) in LOSSES.items()
    for workers, diloco in zip(WORKERS, losses, strict=True)
]


def gap(parameters: float, workers: int, every: int = 30, tokens: float = 20) -> LossGap:
    found = diloco_gap(parameters, workers, every, tokens)
    assert found is not None
    return found


def test_the_coefficients_are_those_of_least_squares() -> None:
    parameters, workers, ratios = np.array(ROWS).T

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
    deviation = 100 * (squares / (len(ROWS) - 3)) ** 0.5
    assert pytest.approx(2 * deviation, rel=0.01) == PERCENT_OF_FIT


def test_the_range_holds_the_losses_of_the_paper() -> None:
    for parameters, workers, ratio in ROWS:
        found = gap(parameters, workers)
        assert found.low <= 100 * (ratio - 1) <= found.high
        assert found.outside == ()


def test_the_range_holds_what_the_demo_has_shown() -> None:
    """docs/results.md: DiLoCo with 4 workers, 0.8M parameters and 10 local steps per round."""
    found = gap(0.8e6, 4, 10)
    assert found.low < 3.3 < found.high
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
