"""Delayed Nesterov: its formula, its blocks, and DiLoCo as blocks of one round."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DelayedNesterov, DelayedNesterovStrategy, DiLoCo
from lightning_loco.algorithms import RoundInfo
from lightning_loco.topology import Complete
from tests.harness.pool import Pool
from tests.harness.toys import (
    ADAMW,
    apply_update,
    assert_close,
    flat_rounds,
    move_to,
    randn,
    run_engine,
    simulate,
)

TARGETS = randn(3, 5)
STARTS = randn(5, seed=1).expand(3, 5)


def published_loop(
    gradients: Tensor, rate: float, momentum: float, every: int, between: float
) -> list[Tensor]:
    """Run the published loop on given pseudo-gradients; return the parameters after each."""
    moved = m = block_sum = torch.zeros_like(gradients[0])
    history = []
    for t, gradient in enumerate(gradients):
        block_sum = block_sum + gradient
        if (t + 1) % every == 0:
            m = momentum * m + block_sum / every
            share = 1 - between * every + between
            moved = moved - rate * (share * momentum * m + gradient / every)
            block_sum = torch.zeros_like(m)
        else:
            moved = moved - rate * (between * momentum * m + gradient / every)
        history.append(moved)
    return history


def test_it_is_the_published_loop(subtests: pytest.Subtests) -> None:
    gradients = randn(9, 4)
    for every, momentum, between in itertools.product(
        [1, 2, 3], [0.0, 0.5, 0.9], [0.0, 0.1, 1 / 3]
    ):
        with subtests.test(every=every, momentum=momentum, between=between):
            algorithm = DelayedNesterov(1.1, momentum, every, between)
            state = algorithm.init(torch.zeros(4, dtype=torch.float64))
            expected = published_loop(gradients, 1.1, momentum, every, between)
            for gradient, after in zip(gradients, expected, strict=True):
                params = torch.zeros(4, dtype=torch.float64)
                apply_update(algorithm, params, gradient.clone(), state)
                assert_close(params, after)
                assert torch.equal(state["outer"], params)


def test_blocks_of_one_round_are_diloco_bit_for_bit(subtests: pytest.Subtests) -> None:
    for momentum, dtype in itertools.product([0.0, 0.9], [torch.float32, torch.float64]):
        with subtests.test(momentum=momentum, dtype=dtype):
            starts, targets = STARTS.to(dtype), TARGETS.to(dtype)
            histories = [
                flat_rounds(algorithm, starts, move_to(targets, 0.3), 12)
                for algorithm in (DelayedNesterov(0.7, momentum, every=1), DiLoCo(0.7, momentum))
            ]
            assert torch.equal(*histories)


def test_blocks_of_one_round_are_torch_sgd_bit_for_bit() -> None:
    gradients = randn(20, 7)
    parameter = torch.nn.Parameter(randn(7, seed=1))
    optimizer = torch.optim.SGD([parameter], 0.7, momentum=0.9, nesterov=True, fused=True)
    algorithm = DelayedNesterov(0.7, 0.9, every=1)
    state = algorithm.init(randn(7, seed=1))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        algorithm.update(None, None, gradient.clone(), state, RoundInfo())
        assert torch.equal(state["outer"], parameter.detach())


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_block_equals_one_nesterov_step_with_its_mean(every: int) -> None:
    gradients = randn(4, every, 6)
    algorithm = DelayedNesterov(0.7, 0.9, every)
    state = algorithm.init(randn(6, seed=1))
    parameter = torch.nn.Parameter(randn(6, seed=1))
    optimizer = torch.optim.SGD([parameter], 0.7, momentum=0.9, nesterov=True)
    for block in gradients:
        for gradient in block:
            algorithm.update(None, None, gradient.clone(), state, RoundInfo())
        parameter.grad = block.mean(0)
        optimizer.step()
        torch.testing.assert_close(state["outer"], parameter.detach(), rtol=0, atol=1e-14)
        assert not state["block_sum"].any()


def test_with_momentum_between_a_block_is_not_one_nesterov_step() -> None:
    gradients = randn(6, 4)
    moved = [published_loop(gradients, 0.7, 0.9, 3, between)[-1] for between in (0.0, 0.2)]
    assert (moved[0] - moved[1]).abs().max() > 0.1


def test_without_momentum_it_is_diloco_with_the_rate_divided_by_n() -> None:
    delayed, plain = DelayedNesterov(2.1, 0.0, every=3), DiLoCo(2.1 / 3, 0.0)
    histories = [flat_rounds(a, STARTS, move_to(TARGETS, 0.3), 7) for a in (delayed, plain)]
    assert torch.equal(*histories)
    assert set(delayed.init(randn(4))) == {"outer"}


def test_it_is_the_same_in_processes(pool: Pool, subtests: pytest.Subtests) -> None:
    algorithm = DelayedNesterov(1.4, 0.3, every=2)
    for world, overlap in itertools.product([2, 3], [False, True]):
        with subtests.test(world=world, overlap=overlap):
            settings = {"sync_every": 2, "overlap": overlap}
            expected = simulate(algorithm, world, 7, inner=ADAMW, **settings)
            first, *others = pool.run(run_engine, algorithm, 7, settings, ADAMW, world=world)
            assert_close(first, expected[:, 0])
            for other in others:
                assert torch.equal(other, first)


def test_the_strategy_takes_its_arguments() -> None:
    strategy = DelayedNesterovStrategy(20, 2.8, 0.9, every=4, between=0.1)
    assert strategy.settings.algorithm == DelayedNesterov(2.8, 0.9, 4, 0.1)


def test_invalid_arguments_are_refused(subtests: pytest.Subtests) -> None:
    invalid: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"outer_lr": 0.0}, ValueError, r"outer_lr must be positive, got 0\.0"),
        ({"outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"every": 0}, ValueError, "every counts rounds and must be at least 1, got 0. Use 1 for"),
        ({"every": 2.0}, TypeError, "every counts rounds and must be an integer, got 2.0"),
        ({"every": True}, TypeError, "must be an integer, got True"),
        ({"between": 0.6}, ValueError, r"between must be in \[0, 1/every\], got 0.6 with every=2"),
        ({"between": -0.1}, ValueError, r"between must be in \[0, 1/every\], got -0.1"),
    ]
    for settings, error, message in invalid:
        with subtests.test(str(settings)), pytest.raises(error, match=message):
            DelayedNesterov(**settings)


def test_it_refuses_a_topology_and_warns_if_it_is_unstable_with_overlap() -> None:
    with pytest.raises(ValueError, match="DelayedNesterov averages over all workers"):
        DelayedNesterov().prepare(4, Complete())
    with pytest.warns(UserWarning, match="every=2 is unstable with overlap when a local phase"):
        DelayedNesterov(2.8, 0.9).prepare(4, None, is_late=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DelayedNesterov(1.4, 0.3).prepare(4, None, is_late=True)
