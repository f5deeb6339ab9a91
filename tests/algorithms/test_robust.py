"""Robust means: they equal their formulas, and one hostile worker of four has bounded influence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, DiLoCoStrategy, LocoStrategy, StepEngine
from lightning_loco.algorithms import GeometricMedian, RobustMean, RoundInfo, State, TrimmedMean
from lightning_loco.algorithms.robust import ROBUST_MEANS
from lightning_loco.engine import RoundSettings
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import (
    TinyModule,
    flat,
    loss_of,
    make_loader,
    make_model,
    train_step,
    worker_batch,
)
from tests.harness.toys import assert_close, randn, run_engine, simulate

ONES = (1.0,) * 5


@pytest.mark.parametrize("trim", [0.1, 0.2, 0.25, 0.4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_the_trimmed_mean_is_its_formula(trim: float, count: int) -> None:
    messages = randn(count, 7)
    found = TrimmedMean(trim).combine(messages.clone(), (1.0,) * count)
    for element in range(7):
        values = sorted(messages[:, element].tolist())
        dropped = next(k for k in itertools.count() if k >= trim * count - 1e-9)
        while 2 * dropped >= count:
            dropped -= 1
        kept = values[dropped : count - dropped]
        assert found[element].item() == pytest.approx(sum(kept) / len(kept), abs=1e-14)


def test_the_geometric_median_has_the_smallest_sum_of_distances() -> None:
    messages = randn(6, 4)

    def total(point: Tensor) -> float:
        return float((messages - point).norm(dim=1).sum())

    found = GeometricMedian(200).combine(messages.clone(), (1.0,) * 6)
    pulls = (messages - found) / (messages - found).norm(dim=1, keepdim=True)
    assert pulls.sum(0).norm() < 1e-6  # the gradient of the sum of distances
    for direction in randn(20, 4, seed=1):
        assert total(found) < total(found + 0.01 * direction)


def test_the_geometric_median_may_be_a_message() -> None:
    """Weiszfeld's formula would divide by zero there."""
    corners = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 0.0]])
    found = GeometricMedian().combine(corners.double(), ONES)
    assert_close(found, torch.zeros(2).double())
    same = randn(1, 3).expand(4, 3).contiguous()
    assert_close(GeometricMedian().combine(same, (1.0,) * 4), same[0])


@pytest.mark.parametrize("mean", [TrimmedMean(), GeometricMedian()], ids=repr)
def test_messages_without_weight_or_with_nan_are_left_out(mean: RobustMean) -> None:
    messages = randn(5, 6)
    expected = mean.combine(messages[[0, 2, 4]], (1.0,) * 3)
    messages[1] = 0.0
    messages[3, 2] = float("nan")
    assert_close(mean.combine(messages.clone(), (1, 0, 1, 1, 1)), expected)
    messages[3, 2] = float("inf")
    assert_close(mean.combine(messages, (1, 0, 1, 1, 1)), expected)
    with pytest.raises(RuntimeError, match="No worker has sent a finite message"):
        mean.combine(messages, (0, 0, 0, 1, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [TrimmedMean(0.4), GeometricMedian()], ids=repr)
def test_hostile_messages_of_any_size_move_the_result_by_no_more(
    mean: RobustMean, dtype: torch.dtype
) -> None:
    """Bound of the geometric median: 2 (1 - a) / (1 - 2 a) times the largest of the others."""
    right = randn(3, 1000).to(dtype) * 1e-3
    bound = 2 * 0.6 / (1 - 0.8) * right.norm(dim=1).max()
    for size in (1e-2, 1.0, 1e10, 1e18, 1e30, 1e38, torch.finfo(dtype).max):
        for signs in ((1, 1), (1, -1)):
            wrong = torch.stack([torch.full((1000,), s * size, dtype=dtype) for s in signs])
            found = mean.combine(torch.cat([right, wrong]), ONES)
            assert found.norm() < bound, (size, signs)


def test_the_share_that_is_trimmed_is_not_rounded_up_by_an_error_of_floats() -> None:
    messages = torch.arange(100.0, dtype=torch.float64)[:, None].square()
    found = TrimmedMean(0.07).combine(messages, (1.0,) * 100)
    assert found.item() == pytest.approx(messages[7:93].mean().item())


@pytest.mark.parametrize("mean", [TrimmedMean(), GeometricMedian()], ids=repr)
def test_order_and_sign_and_scale_of_messages(mean: RobustMean) -> None:
    messages = randn(5, 6)
    found = mean.combine(messages.clone(), ONES)
    torch.testing.assert_close(mean.combine(messages.flip(0), ONES), found)
    torch.testing.assert_close(mean.combine(-3 * messages, ONES), -3 * found)
    torch.testing.assert_close(mean.combine(messages + 1, ONES), found + 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TrimmedMean(0.0), ValueError, r"trim .* must be in \(0, 0.5\), got 0.0"),
        (lambda: TrimmedMean(0.5), ValueError, "trim"),
        (lambda: GeometricMedian(0), ValueError, "iterations must be at least 1"),
        (lambda: GeometricMedian(1.5), TypeError, "iterations must be an integer"),  # type: ignore[arg-type]
        (
            lambda: DiLoCo(aggregate="krum"),
            ValueError,
            "Unknown aggregate 'krum'. Use one of 'mean'",
        ),
        (lambda: DiLoCo(aggregate=3), TypeError, "aggregate must be 'mean', 'trimmed_mean'"),  # type: ignore[arg-type]
        (
            lambda: RoundSettings(DiLoCo(aggregate=TrimmedMean()), compression="int8").prepare(4),
            ValueError,
            "DiLoCo sends every message to all workers, which cannot be compressed",
        ),
        (
            lambda: RoundSettings(DiLoCo(aggregate=TrimmedMean()), topology="ring").prepare(4),
            ValueError,
            "takes no topology",
        ),
    ],
)
def test_bad_settings_are_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_two_workers_are_warned() -> None:
    with pytest.warns(UserWarning, match="cannot tell which of 2 workers is wrong"):
        DiLoCo(aggregate="trimmed_mean").prepare(2, None)


# ---------------------------------------------------------------------- in rounds

AGGREGATES = [*ROBUST_MEANS, TrimmedMean(0.4)]
ROUNDS, SYNC_EVERY = 4, 2


def fit(rank: int, world: int, algorithm: DiLoCo, overlap: bool) -> Tensor:
    strategy = LocoStrategy(algorithm, sync_every=SYNC_EVERY, overlap=overlap)
    trainer = make_trainer(strategy, max_steps=ROUNDS * SYNC_EVERY, use_distributed_sampler=False)
    module = TinyModule(lr=0.05)
    trainer.fit(module, make_loader(rank, ROUNDS * SYNC_EVERY))
    return flat(module)


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_same_numbers(pool: Pool, aggregate: str | RobustMean, overlap: bool) -> None:
    algorithm = DiLoCo(0.7, 0.3, aggregate=aggregate)
    settings: dict[str, Any] = {"sync_every": SYNC_EVERY, "overlap": overlap}
    expected = simulate(algorithm, 4, ROUNDS, **settings)
    settings["bucket_bytes"] = 4096
    histories = pool.run(run_engine, algorithm, ROUNDS, settings, world=4)
    assert_close(torch.stack(histories, dim=1), expected)
    plain = simulate(DiLoCo(0.7, 0.3), 4, ROUNDS, sync_every=SYNC_EVERY, overlap=overlap)
    assert (plain - expected).abs().max() > 1e-3
    ended = simulate(algorithm, 4, ROUNDS, last_round=False, sync_every=SYNC_EVERY, overlap=overlap)
    for final in pool.run(fit, algorithm, overlap, world=4):
        assert_close(final, ended[-1, 0])


def test_the_same_by_hand() -> None:
    """DiLoCo as a plain loop with the formula of the trimmed mean."""
    algorithm = DiLoCo(0.7, 0.5, aggregate="trimmed_mean")
    found = simulate(algorithm, 4, ROUNDS, sync_every=SYNC_EVERY)[ROUNDS - 1]
    model = make_model()
    outer, buffer = flat(model), torch.zeros_like(flat(model))
    for t in range(ROUNDS):
        gradients = []
        for worker in range(4):
            torch.nn.utils.vector_to_parameters(outer.clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(SYNC_EVERY * t, SYNC_EVERY * (t + 1)):
                optimizer.zero_grad()
                loss_of(model, worker_batch(worker, step)).backward()
                optimizer.step()
            gradients.append(outer - flat(model))
        gradient = torch.stack(gradients).sort(0).values[1:3].mean(0)
        buffer = 0.5 * buffer + gradient
        outer = outer - 0.7 * (gradient + 0.5 * buffer)
    for params in found:
        assert_close(params, outer)


def save_and_resume(rank: int, world: int, aggregate: str) -> bool:
    """Return whether a run resumed with a round pending equals an uninterrupted one."""
    ends = []
    for saves_at in (None, 8):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        algorithm = DiLoCo(0.7, 0.3, aggregate=aggregate)
        engine = StepEngine(model, algorithm, sync_every=3, overlap=True)
        for step in range(14):
            if step == saves_at:
                saved = engine.state_dict()
                assert saved["fragments"][0]["pending"] is not None
                engine.close()
                engine = StepEngine(model, algorithm, sync_every=3, overlap=True)
                engine.load_state_dict(saved)
            train_step(model, optimizer, worker_batch(rank, step))
            engine.step()
        engine.drain()
        engine.close()
        ends.append(flat(model))
    return torch.equal(*ends)


@pytest.mark.parametrize("aggregate", list(ROBUST_MEANS))
def test_a_resumed_run_is_the_same(pool: Pool, aggregate: str) -> None:
    assert all(pool.run(save_and_resume, aggregate, world=3))


# --------------------------------------------------------------------- hostile workers

ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flipped": lambda message: -message,
    "scaled by 100": lambda message: 100 * message,
    "noise": lambda message: message + torch.randn(message.shape, dtype=message.dtype),
}


def attacking(attack: str) -> Callable[..., Tensor]:
    """``DiLoCo.propose`` of a hostile worker."""
    honest = DiLoCo.propose

    def propose(self: DiLoCo, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params.copy_(ATTACKS[attack](honest(self, params, state, info)))

    return propose


def fit_with_attacker(rank: int, world: int, aggregate: str, attack: str) -> Tensor:
    steps = 60
    with mock.patch.object(DiLoCo, "propose", attacking(attack) if rank == 3 else DiLoCo.propose):
        torch.manual_seed(rank)
        strategy = DiLoCoStrategy(4, 0.7, 0.5, aggregate=aggregate)
        trainer = make_trainer(strategy, max_steps=steps, use_distributed_sampler=False)
        module = TinyModule(lr=0.05)
        trainer.fit(module, make_loader(0, steps))  # the same task for all
    return flat(module)


def loss_at(params: Tensor) -> float:
    model = make_model()
    torch.nn.utils.vector_to_parameters(params, model.parameters())
    with torch.no_grad():
        return float(sum(loss_of(model, worker_batch(0, step)) for step in range(1000, 1020)))


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_one_hostile_worker_of_four_does_no_harm(
    pool: Pool, attack: str, subtests: pytest.Subtests
) -> None:
    honest = loss_at(pool.run(fit_with_attacker, "mean", "sign flipped", world=3)[0])
    for aggregate in ROBUST_MEANS:
        with subtests.test(aggregate):
            found = pool.run(fit_with_attacker, aggregate, attack, world=4)
            assert all(torch.equal(params, found[0]) for params in found)
            assert loss_at(found[0]) < 1.05 * honest
    with subtests.test("the plain mean"):
        found = pool.run(fit_with_attacker, "mean", attack, world=4)
        assert not loss_at(found[0]) < 1.05 * honest
