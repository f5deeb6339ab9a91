"""Schedules of the outer learning rate: values, algorithms, resume, logging, errors."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from lightning_loco import (
    CommunicationMonitor,
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    LocoStrategy,
)
from lightning_loco.algorithms import Algorithm, Cosine, Linear, Piecewise, RoundInfo
from lightning_loco.algorithms.outer_lr import OuterLR, highest_rate, rate_at
from lightning_loco.topology import Complete, Ring
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.harness.toys import assert_close, flat_rounds, move_to, randn, simulate

TARGETS = randn(4, 5)
STARTS = randn(5, seed=1).expand(4, 5)


def halved(round_index: int, first: float = 0.8) -> float:
    """A schedule defined by a user."""
    return first * 0.5**round_index


SCHEDULES: dict[str, OuterLR] = {
    "cosine": Cosine(0.9, 0.1, rounds=6),
    "linear": Linear(0.1, 0.9, rounds=3),
    "piecewise": Piecewise({0: 0.7, 2: 0.3, 5: 0.1}),
    "function": halved,
    "partial": partial(halved, first=0.4),
}


# ------------------------------------------------------------------------------- the values


def test_values_of_the_schedules() -> None:
    assert [Linear(1.0, 2.0, rounds=4)(t) for t in range(6)] == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    cosine = [0.1 + 0.8 * 0.5 * (1 + math.cos(math.pi * t / 8)) for t in range(9)]
    assert [Cosine(0.9, 0.1, rounds=8)(t) for t in range(9)] == pytest.approx(cosine)
    assert Cosine(0.9, 0.1, rounds=8)(0) == 0.9
    assert Cosine(0.9, 0.1, rounds=8)(1000) == pytest.approx(0.1)
    rates = [Piecewise({4: 0.2, 0: 0.7})(t) for t in (0, 3, 4, 99)]
    assert rates == [0.7, 0.7, 0.2, 0.2]


def test_they_can_be_pickled_compared_and_hashed(subtests: pytest.Subtests) -> None:
    for name, outer_lr in SCHEDULES.items():
        with subtests.test(name):
            again = pickle.loads(pickle.dumps(DiLoCo(outer_lr)))
            rates = [rate_at(outer_lr, t) for t in range(9)]
            assert [rate_at(again.outer_lr, t) for t in range(9)] == rates
            if not isinstance(outer_lr, partial):
                assert again == DiLoCo(outer_lr)
                assert hash(again) == hash(DiLoCo(outer_lr))
            assert highest_rate(outer_lr) == max(rates)


# ------------------------------------------------------------------------ in the algorithms


def test_diloco_is_torch_sgd_whose_rate_is_set_before_each_step(subtests: pytest.Subtests) -> None:
    for (name, outer_lr), momentum in itertools.product(SCHEDULES.items(), [0.0, 0.6]):
        with subtests.test(name, momentum=momentum):
            outer = torch.nn.Parameter(STARTS[0].clone())
            optimizer = torch.optim.SGD([outer], 1.0, momentum=momentum, nesterov=momentum > 0)
            history = flat_rounds(DiLoCo(outer_lr, momentum), STARTS, move_to(TARGETS, 0.4), 8)
            for t in range(8):
                optimizer.param_groups[0]["lr"] = rate_at(outer_lr, t)
                outer.grad = 0.4 * (outer.detach() - TARGETS.mean(0))
                optimizer.step()
                assert_close(history[t + 1], outer.detach().expand(4, 5))


def test_delayed_nesterov_takes_the_rate_of_the_round(subtests: pytest.Subtests) -> None:
    gradients = randn(7, 5)
    for name, outer_lr in SCHEDULES.items():
        with subtests.test(name):
            algorithm = DelayedNesterov(outer_lr, 0.6, every=3)
            state = algorithm.init(torch.zeros(5, dtype=torch.float64))
            moved = m = block_sum = torch.zeros(5, dtype=torch.float64)
            for t, gradient in enumerate(gradients):
                algorithm.update(None, None, gradient.clone(), state, RoundInfo())
                block_sum = block_sum + gradient
                step = gradient / 3
                if t % 3 == 2:
                    m, block_sum = 0.6 * m + block_sum / 3, torch.zeros_like(m)
                    step = step + 0.6 * m
                moved = moved - rate_at(outer_lr, t) * step
                assert_close(state["outer"], moved)


def test_gasloc_takes_the_rate_of_the_round_and_momentum_keeps_earlier_rates(
    subtests: pytest.Subtests,
) -> None:
    mixing = Ring().mixing_matrix(4, 0)
    for (name, outer_lr), momentum in itertools.product(SCHEDULES.items(), [0.0, 0.3]):
        with subtests.test(name, momentum=momentum):
            algorithm = GASLoC(outer_lr, 1.0, momentum, "local").prepare(4, Ring())
            history = flat_rounds(algorithm, STARTS, move_to(TARGETS, 0.4), 8, Ring())
            theta, before = STARTS.clone(), STARTS.clone()
            for t in range(8):
                u = theta + rate_at(outer_lr, t) * 0.4 * (TARGETS - theta)
                theta, before = mixing @ u + momentum * (u - before), u
                assert_close(history[t + 1], theta)


def test_on_a_complete_graph_gasloc_is_diloco_without_momentum_only() -> None:
    """Momentum on u contains earlier rates, torch's buffer does not; equal for constant rates."""

    def apart(outer_lr: OuterLR, momentum: float) -> float:
        gossip = GASLoC(outer_lr, 1.0, momentum, "gossiped").prepare(4, Complete())
        both = [
            flat_rounds(gossip, STARTS, move_to(TARGETS, 0.4), 8, Complete()),
            flat_rounds(DiLoCo(outer_lr, momentum), STARTS, move_to(TARGETS, 0.4), 8),
        ]
        return float((both[0] - both[1]).abs().max())

    cosine = Cosine(0.9, 0.1, rounds=6)
    assert apart(cosine, 0.0) < 1e-12
    assert apart(0.7, 0.6) < 1e-12
    assert apart(cosine, 0.6) > 1e-2


def test_a_constant_schedule_is_the_number_bit_for_bit(subtests: pytest.Subtests) -> None:
    constant = Piecewise({0: 0.7})
    pairs: list[tuple[Algorithm, Algorithm]] = [
        (DiLoCo(constant, 0.3), DiLoCo(0.7, 0.3)),
        (DelayedNesterov(constant, 0.3, every=2), DelayedNesterov(0.7, 0.3, every=2)),
        (EagerDiLoCo(constant, 0.3), EagerDiLoCo(0.7, 0.3)),
        (GASLoC(constant), GASLoC(0.7)),
    ]
    for (scheduled, plain), overlap in itertools.product(pairs, [False, True]):
        with subtests.test(type(plain).__name__, overlap=overlap):
            settings = {"sync_every": 2, "overlap": overlap}
            history = simulate(scheduled, 3, 5, **settings)
            assert torch.equal(history, simulate(plain, 3, 5, **settings))


def test_a_number_needs_no_counter() -> None:
    for algorithm in (
        DiLoCo(0.7, 0.9),
        GASLoC(momentum=0.3),
        EagerDiLoCo(),
        DelayedNesterov(every=1),
    ):
        assert "rounds" not in algorithm.init(randn(4))
        assert algorithm.metrics(algorithm.init(randn(4))) == {}


def test_the_last_correction_of_eager_diloco_takes_the_rate_of_the_last_step() -> None:
    algorithm = EagerDiLoCo(halved, 0.0, share=0.5)
    state = algorithm.init(torch.zeros(1, dtype=torch.float64))
    algorithm.on_send(torch.tensor([2.0]).double(), None, state, RoundInfo())
    assert state["outer"].item() == pytest.approx(-0.8)
    mean = torch.tensor([3.0]).double()
    algorithm.update(None, None, mean, state, RoundInfo())
    assert state["outer"].item() == pytest.approx(-0.8 * 3)


# ------------------------------------------------------------------------------ in a Trainer


class Recorder(CommunicationMonitor):
    """Records logged values."""

    def __init__(self) -> None:
        super().__init__(prog_bar=True)
        self.rates: list[float] = []

    def metrics(self, strategy: Any) -> dict[str, float]:
        found = super().metrics(strategy)
        self.rates.append(found["loco/outer_lr"])
        return found


def fit(rank: int, world: int, algorithm: Algorithm) -> list[float]:
    monitor = Recorder()
    strategy = LocoStrategy(algorithm, sync_every=2)
    trainer = make_trainer(
        strategy, max_steps=12, callbacks=[monitor], use_distributed_sampler=False
    )
    trainer.fit(TinyModule(), make_loader(rank, 12))
    return monitor.rates


@pytest.mark.parametrize("algorithm", [DiLoCo(halved, 0.5), GASLoC(halved)], ids=["mean", "gossip"])
def test_rates_are_logged(pool: Pool, algorithm: Algorithm) -> None:
    for rates in pool.run(fit, algorithm, world=2):
        assert sorted(set(rates), reverse=True) == [halved(t) for t in range(5)]


# ---------------------------------------------------------------------------------- refused


def broken_later(round_index: int) -> float:
    return 0.7 if round_index < 2 else -1.0


def test_invalid_rates_are_refused(subtests: pytest.Subtests) -> None:
    of_first_round = r"outer_lr\(0\), the rate of the first round,"
    invalid: list[tuple[Any, type[Exception], str]] = [
        ("0.7", TypeError, r"outer_lr must be a number, or a schedule such as Cosine\("),
        (True, TypeError, "outer_lr must be a number"),
        (-0.1, ValueError, "outer_lr must be positive, got -0.1"),
        (lambda t: 0.0, ValueError, f"{of_first_round} must be positive"),
        (lambda t: "0.7", TypeError, f"{of_first_round} must be a number"),
    ]
    for kind in (DiLoCo, GASLoC, EagerDiLoCo, DelayedNesterov):
        for outer_lr, error, message in invalid:
            name = kind.__name__
            with subtests.test(name, message=message), pytest.raises(error, match=message):
                kind(outer_lr)


def test_schedules_of_invalid_rates_are_refused(subtests: pytest.Subtests) -> None:
    invalid: list[tuple[Any, type[Exception], str]] = [
        (lambda: Cosine(0.9, 0.0, rounds=3), ValueError, "end must be positive, got 0.0"),
        (lambda: Linear(-1.0, 0.1, rounds=3), ValueError, "start must be positive, got -1.0"),
        (lambda: Linear(0.1, 0.2, rounds=0), ValueError, "rounds must be at least 1, got 0"),
        (lambda: Linear(0.1, 0.2, rounds=1.5), TypeError, "rounds must be an integer, got 1.5"),
        (lambda: Piecewise({1: 0.7}), ValueError, r"must begin at round 0, got \{1: 0.7\}"),
        (lambda: Piecewise({}), ValueError, "rates must begin at round 0"),
        (lambda: Piecewise({0: 0.7, -1: 0.1}), ValueError, "rates must begin at round 0"),
        (lambda: Piecewise({0: 0.7, 5: -1}), ValueError, "rate from round 5 on must be posi"),
        (lambda: Piecewise({0.5: 0.7}), TypeError, "begin at the number of a round, got 0.5"),
        (lambda: Piecewise([0.7]), TypeError, r"rates must be a mapping such as \{0: 0.7\}"),
    ]
    for number, (make, error, message) in enumerate(invalid):
        with subtests.test(message, row=number), pytest.raises(error, match=message):
            make()


def test_an_invalid_rate_in_a_later_round_is_named_with_its_round() -> None:
    with pytest.raises(RuntimeError, match="In round 2: outer_lr must be positive, got -1.0"):
        flat_rounds(DiLoCo(broken_later), STARTS, move_to(TARGETS, 0.4), 5)


def test_a_schedule_with_an_outer_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="outer_optimizer has its own rate, and outer_lr="):
        DiLoCo(Cosine(0.9, 0.1, rounds=5), outer_optimizer=torch.optim.AdamW)


def test_the_overlap_warning_uses_the_highest_rate() -> None:
    with pytest.warns(UserWarning, match="unstable with overlap"):
        DiLoCo(Linear(0.1, 0.7, rounds=50), 0.9).prepare(2, None, is_late=True)
