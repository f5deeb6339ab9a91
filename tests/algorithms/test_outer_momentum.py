"""Outer momentum that follows the persistence of pseudo-gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_loco import DelayedNesterov, DiLoCo, EagerDiLoCo
from lightning_loco.algorithms import DecoupledDiLoCo, Piecewise, RoundInfo
from lightning_loco.algorithms.decoupled_diloco import Push, TensorRange
from lightning_loco.algorithms.outer_momentum import OUTER_STEP, momentum_for, outer_step


def run(algorithm: DiLoCo, gradients: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    """Return the momentum of each round, and the outer parameters after it."""
    state = algorithm.init(torch.zeros_like(gradients[0]))
    used, outer = [], []
    for index, gradient in enumerate(gradients):
        outer.append(
            algorithm.update(None, None, gradient.clone(), state, RoundInfo(index)).clone()
        )
        used.append(algorithm.metrics(state)["outer_momentum"])
    return used, outer


@pytest.mark.parametrize("outer_lr", [0.5, 0.7, 1.0])
def test_the_step_is_held_whatever_the_persistence(outer_lr: float) -> None:
    for persistence in (1.0, 0.9, 0.8):
        momentum = momentum_for(outer_lr, persistence)
        assert outer_step(outer_lr, momentum, persistence) == pytest.approx(OUTER_STEP, rel=0.01)
    assert momentum_for(outer_lr, 0.1) == momentum_for(outer_lr, 0.5)
    assert momentum_for(OUTER_STEP, 0.5) == momentum_for(2.0, 0.0) == 0
    assert momentum_for(0.3, 0.5) == pytest.approx(0.9, abs=1e-3)


def test_steps_along_equal_pseudo_gradients_are_as_long_as_the_step_says() -> None:
    used, outer = run(DiLoCo(0.7, "auto"), [torch.full((100,), 2.0)] * 60)
    assert used[-1] == pytest.approx(1 - 0.7 / OUTER_STEP, abs=1e-3)
    moved = outer[-2] - outer[-1]
    torch.testing.assert_close(moved, torch.full((100,), 2 * OUTER_STEP), rtol=0.005, atol=0)


@pytest.mark.parametrize("persistence", [0.95, 0.8, 0.6])
def test_the_persistence_is_found_from_the_momentum_buffer(persistence: float) -> None:
    """Of pseudo-gradients each of which keeps a share of the one before, of equal length."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(200_000, generator=generator)]  # every third element is in the sample
    for _ in range(30):
        new = torch.randn(200_000, generator=generator)
        share = math.sqrt(1 - persistence**2)
        gradients.append(persistence * gradients[-1] + share * new)
    used, _ = run(DiLoCo(0.7, "auto"), gradients)
    assert used[-1] == pytest.approx(momentum_for(0.7, persistence), abs=0.02)


def test_steps_that_are_too_long_lower_the_momentum() -> None:
    """Pseudo-gradients then point against the momentum."""
    gradient = torch.ones(10)
    used, outer = run(DiLoCo(0.4, "auto"), [gradient, -gradient] * 20)
    assert used[-1] == momentum_for(0.4, 1.0)
    assert max(float(point.abs().max()) for point in outer) < 1.5


def test_unrelated_pseudo_gradients_do_not_raise_the_momentum_without_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    used, _ = run(DiLoCo(0.7, "auto"), list(torch.randn(40, 1000, generator=generator)))
    assert max(used) <= momentum_for(0.7, 0.5) == pytest.approx(0.73, abs=0.01)


def test_elements_that_are_not_in_a_sparse_message_move_by_the_momentum_alone() -> None:
    """So the persistence counts as at least their share, although messages have none in common."""
    gradients = [torch.zeros(1000) for _ in range(20)]
    for number, gradient in enumerate(gradients):
        gradient[50 * number : 50 * (number + 1)] = 1.0
    used, _ = run(DiLoCo(0.7, "auto"), gradients)
    assert used[-1] == momentum_for(0.7, 0.95)


def test_the_first_round_takes_pseudo_gradients_to_persist() -> None:
    used, _ = run(DiLoCo(0.7, "auto"), [torch.zeros(3), torch.ones(3)])
    assert used == [momentum_for(0.7, 1.0)] * 2  # zero, as without local steps, says nothing


def test_a_schedule_has_the_momentum_of_its_highest_rate() -> None:
    """Not of each rate, which would keep the steps as long as before."""
    used, outer = run(DiLoCo(Piecewise({0: 0.35, 20: 0.7}), "auto"), [torch.ones(5)] * 40)
    assert set(used) == {momentum_for(0.7, 1.0)}
    early, late = outer[18] - outer[19], outer[38] - outer[39]
    torch.testing.assert_close(late, torch.full((5,), OUTER_STEP), rtol=0.005, atol=0)
    torch.testing.assert_close(late, 2 * early)


def test_of_a_function_the_first_rate_and_the_present_one_are_known() -> None:
    used, _ = run(DiLoCo((0.7, 0.35, 1.2).__getitem__, "auto"), [torch.ones(5)] * 3)
    assert used == [momentum_for(0.7, 1.0)] * 2 + [0]


def test_rounds_without_momentum_leave_nothing_of_earlier_ones() -> None:
    rates = [0.7, 0.7, *[1.2] * 4, 0.7, 0.7]
    algorithm = DiLoCo(rates.__getitem__, "auto")
    along, across = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    used, outer = run(algorithm, [along, along, *[across] * 6])
    assert used[2:6] == [0] * 4
    assert used[6] < momentum_for(0.7, 0.8)  # the last rounds persist
    assert outer[-1][0] == outer[1][0]  # the first ones moved it last


def test_the_warning_of_late_results_is_about_a_momentum_that_auto_can_choose() -> None:
    with pytest.warns(UserWarning, match="outer_momentum=auto is .* covers more than 57%"):
        DiLoCo(0.7, "auto").prepare(2, None, is_late=True)
    with pytest.warns(UserWarning, match="covers more than 57%"):
        DiLoCo(Piecewise({0: 0.7, 9: 0.1}), "auto").prepare(2, None, is_late=True)


def test_the_syncer_computes_the_same() -> None:
    method = DecoupledDiLoCo(aggregate="mean")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator).add_(1) for _ in range(8)]
    used, outer = run(DiLoCo(), gradients)
    state = method.init(torch.zeros(50))
    for expected, gradient in zip(outer, gradients, strict=True):
        push = Push(steps=1, tokens=1)
        found = method.merge(gradient[None].clone(), [push], state, [TensorRange(0, 50)])
        assert torch.equal(found, expected)
    assert state["persistence.momentum"] == used[-1] != used[0]
    assert all(isinstance(value, (Tensor, float, int)) for value in state.values())


def test_other_names_and_other_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="a number in \\[0, 1\\) or \"auto\", got 'atuo'"):
        DiLoCo(outer_momentum="atuo")  # type: ignore[arg-type]
    for method in (EagerDiLoCo, DelayedNesterov):
        with pytest.raises(TypeError, match="outer_momentum must be a number"):
            method(outer_momentum="auto")  # type: ignore[arg-type]
