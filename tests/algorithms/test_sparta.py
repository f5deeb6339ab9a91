"""SPARTA: it equals a plain loop, sends a part of the parameters, and preserves the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_loco as loco
from lightning_loco import Simulation, StepEngine
from lightning_loco.algorithms import LocalSGD, RoundInfo
from lightning_loco.algorithms.sparta import SPARTA, random_integers
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import Staggered
from tests.harness.gpu import DEVICE
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import (
    TinyModule,
    flat,
    make_loader,
    make_model,
    train_step,
    worker_batch,
)
from tests.harness.toys import Point, assert_close, randn, run_engine, simulate

ROUNDS = 12
QUARTER = SPARTA(0.25, seed=3)


def positions(numel: int, algorithm: SPARTA, round_index: int) -> list[int]:
    """Return the parameters that are averaged in a round, in order."""
    every = algorithm.granularity
    chosen = []
    for number, start in enumerate(range(0, numel, every)):
        length = min(every, numel - start)
        drawn = random_integers(torch.tensor([number]), algorithm.seed, round_index)
        chosen.append(start + int(drawn) % length)
    return chosen


def by_hand(algorithm: SPARTA, world: int, rounds: int, sync_every: int) -> Tensor:
    """SPARTA as a plain loop: ``(rounds, N, P)``."""
    models = [make_model() for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    history = []
    for t in range(rounds):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(t * sync_every, (t + 1) * sync_every):
                train_step(model, optimizer, worker_batch(worker, step))
        params = torch.stack([flat(model) for model in models])
        chosen = positions(params.shape[1], algorithm, t)
        params[:, chosen] = params[:, chosen].sum(0) / world
        for model, own in zip(models, params, strict=True):
            torch.nn.utils.vector_to_parameters(own.clone(), model.parameters())
        history.append(params)
    return torch.stack(history)


def fit(rank: int, world: int) -> Tensor:
    strategy = loco.SPARTAStrategy(fraction=0.25, seed=3, finalize="keep")
    trainer = make_trainer(strategy, max_steps=ROUNDS, use_distributed_sampler=False)
    module = TinyModule(lr=0.05)
    trainer.fit(module, make_loader(rank, ROUNDS))
    return flat(module)


@pytest.mark.parametrize("sync_every", [1, 3])
def test_it_equals_its_plain_loop(pool: Pool, sync_every: int) -> None:
    expected = by_hand(QUARTER, 3, ROUNDS, sync_every)
    assert_close(simulate(QUARTER, 3, ROUNDS, sync_every=sync_every)[:ROUNDS], expected)
    settings: dict[str, Any] = {"sync_every": sync_every}
    histories = pool.run(run_engine, QUARTER, ROUNDS, settings, world=3)
    assert_close(torch.stack([h[:ROUNDS] for h in histories], dim=1), expected)
    if sync_every == 1:  # a Trainer ends before the last round
        before = expected[-2]
        for rank, final in enumerate(pool.run(fit, world=3)):
            model = make_model()
            torch.nn.utils.vector_to_parameters(before[rank].clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            train_step(model, optimizer, worker_batch(rank, ROUNDS - 1))
            assert_close(final, flat(model))


def test_all_parameters_in_each_round_are_local_sgd() -> None:
    settings: dict[str, Any] = {"sync_every": 2}
    assert_close(simulate(SPARTA(1.0), 3, 5, **settings), simulate(LocalSGD(), 3, 5, **settings))


def test_the_mean_is_kept_and_other_parameters_are_left_alone() -> None:
    models = [Point(randn(40, seed=worker)) for worker in range(4)]
    simulation = Simulation(models, SPARTA(0.1), sync_every=1)
    for model, worker in zip(models, range(4), strict=True):
        model.value.data.copy_(randn(40, seed=worker))
    before = torch.stack(simulation.params())
    simulation.make_round()
    after = torch.stack(simulation.params())
    chosen = positions(40, SPARTA(0.1), 0)
    others = [k for k in range(40) if k not in chosen]
    assert len(chosen) == 4
    assert_close(after.mean(0), before.mean(0))
    assert torch.equal(after[:, others], before[:, others])
    assert_close(after[:, chosen], before[:, chosen].mean(0).expand(4, -1))


def test_parameters_are_drawn_evenly_and_anew_in_each_round() -> None:
    algorithm, numel, rounds = SPARTA(0.1), 1000, 400
    counts = torch.zeros(numel)
    repeated = 0
    last: Tensor | None = None
    for t in range(rounds):
        chosen = algorithm.propose(torch.arange(numel), {}, RoundInfo(t))
        assert len(chosen) == algorithm.message_length(numel) == 100
        assert torch.equal(torch.div(chosen, 10, rounding_mode="floor"), torch.arange(100))
        counts[chosen] += 1
        repeated += 0 if last is None else int((last == chosen).sum())
        last = chosen
    expected = rounds / 10
    chi2 = ((counts - expected).square() / expected).sum().item()
    assert 700 < chi2 < 1100  # 900 degrees of freedom, standard deviation 42
    assert 0.08 < repeated / (100 * (rounds - 1)) < 0.12
    other = SPARTA(0.1, seed=1).propose(torch.arange(numel), {}, RoundInfo(0))
    assert not torch.equal(other, algorithm.propose(torch.arange(numel), {}, RoundInfo(0)))


def test_slices_draw_what_the_whole_draws() -> None:
    params, info = randn(103), RoundInfo(5)
    whole = QUARTER.propose(params, {}, info)
    parts = [(0, 40), (40, 44), (44, 103)]
    found = [QUARTER.propose(params[a:b].clone(), {}, RoundInfo(5, start=a)) for a, b in parts]
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("seed", [0, -1, 2**31, -(2**200)])
def test_any_integer_is_a_seed(seed: int) -> None:
    drawn = random_integers(torch.arange(50_000), seed, 2**40)
    assert drawn.dtype == torch.int64
    assert len(set(drawn.tolist())) == 50_000  # distinct numbers in [0, 2**31)
    assert 0 <= drawn.min() < 2**31 / 1000
    assert 2**31 * 0.999 < drawn.max() < 2**31
    other = random_integers(torch.arange(50_000), seed + 1, 2**40)
    assert (drawn % 200 == other % 200).double().mean() < 0.01  # 0.005 expected by chance
    last = random_integers(torch.tensor([2**40]), seed, 0)
    assert 0 <= last.item() < 2**31


@pytest.mark.parametrize(
    ("fraction", "granularity"),
    [(1.0, 1), (0.7, 1), (0.5, 2), (0.3, 3), (0.005, 200), (1e-30, 2**31 - 1), (5e-324, 2**31 - 1)],
)
def test_fractions_are_rounded_such_that_one_over_p_is_an_integer(
    fraction: float, granularity: int
) -> None:
    algorithm = SPARTA(fraction)
    assert algorithm.granularity == granularity
    params = torch.arange(600.0)
    message = algorithm.propose(params, {}, RoundInfo(1))
    assert len(message) == algorithm.message_length(600) == -(-600 // granularity)
    result = algorithm.update(params, None, -message, {}, RoundInfo(1))
    assert result.sign().eq(-1).sum() == len(message) - message.eq(0).sum()


def test_on_a_device_nothing_is_read_back() -> None:
    params, info = torch.empty(103, device=DEVICE), RoundInfo(2, start=40)
    message = QUARTER.propose(params, {}, info)
    assert (message.device, message.shape) == (DEVICE, (26,))
    assert QUARTER.update(params, None, message, {}, info).device == DEVICE


class Odd(torch.nn.Module):
    """A tied tensor and another one, in chunks of one parameter, and a frozen parameter.

    The trainable tensors have 1,025 elements.

    Args:
        dtype: Dtype of the parameters.
        seed: Random seed, different on each worker.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        values = randn(1125, seed=seed).to(dtype)
        self.long = torch.nn.Parameter(values[:1000].clone())
        self.tied = self.long
        self.short = torch.nn.Parameter(values[1000:1025].clone())
        self.frozen = torch.nn.Parameter(values[1025:].clone(), requires_grad=False)


def make_one_round(
    rank: int, world: int, dtype: torch.dtype, bucket_bytes: int
) -> tuple[list[Tensor], list[Tensor], bool]:
    model = Odd(dtype, seed=0)
    engine = StepEngine(model, QUARTER, sync_every=1, bucket_bytes=bucket_bytes)
    own = Odd(dtype, seed=rank)
    limits = torch.finfo(dtype)
    own.long.data[8:12] = torch.tensor([-0.0, limits.tiny / 8, limits.max / 4, 0.1], dtype=dtype)
    model.load_state_dict(own.state_dict())
    engine.step()
    engine.close()
    whole = [torch.cat([m.long, m.short]).detach() for m in (own, model)]
    return whole, [own.frozen, model.frozen.detach()], model.tied is model.long


@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parameters_that_are_not_drawn_are_unchanged_bit_for_bit(
    pool: Pool, dtype: torch.dtype, bucket_bytes: int
) -> None:
    """Also in a model of a narrow dtype, whose rounds run in float32."""
    found = pool.run(make_one_round, dtype, bucket_bytes, world=2)
    chosen = positions(1025, QUARTER, 0)
    others = [k for k in range(1025) if k not in chosen]
    wide = torch.promote_types(dtype, torch.float32)
    before = torch.stack([whole[0] for whole, _, _ in found])
    mean = (before[:, chosen].to(wide).sum(0) / 2).to(dtype)
    for (own, after), frozen, is_tied in found:
        assert after.dtype == dtype
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(after[others].view(bits), own[others].view(bits))
        assert torch.equal(after[chosen], mean)
        assert torch.equal(*frozen)
        assert is_tied


def test_fragments_are_refused_unless_they_begin_where_stretches_do() -> None:
    even = Staggered(4, 2, delay=0, pattern="even")
    with pytest.raises(ValueError, match="must begin at multiples of 4, which SPARTA is made of"):
        RoundSettings(QUARTER, even).prepare(2).fragment_slices({"p": 58})
    slices = RoundSettings(QUARTER, even).prepare(2).fragment_slices({"p": 64})
    assert slices == [[range(32)], [range(32, 64)]]
    with pytest.raises(ValueError, match="overlap=True needs an algorithm"):
        RoundSettings(QUARTER, Staggered(4, 2, delay=1))


def count_bytes(rank: int, world: int, algorithm: Any) -> int:
    model = Point(torch.zeros(100_000))
    engine = StepEngine(model, algorithm, sync_every=1)
    before = engine.statistics.bytes_sent
    for _ in range(10):
        model.value.data.add_(rank)
        engine.step()
    sent = engine.statistics.bytes_sent - before
    engine.close()
    return sent


def test_bytes_are_the_fraction_and_the_statuses(pool: Pool) -> None:
    whole = pool.run(count_bytes, LocalSGD(), world=2)[0]
    part = pool.run(count_bytes, SPARTA(0.01), world=2)[0]
    assert part == pytest.approx(0.01 * whole, rel=0.15)
    assert 10 * 4 * 1000 <= part <= 10 * (4 * 1000 + 2 * 4 * 8)


def save_and_resume(rank: int, world: int) -> bool:
    """Return whether a resumed run equals an uninterrupted one bit for bit."""
    ends = []
    for saves_at in (None, 7):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = StepEngine(model, QUARTER, sync_every=2)
        for step in range(13):
            if step == saves_at:
                saved = engine.state_dict()
                engine.close()
                engine = StepEngine(model, QUARTER, sync_every=2)
                engine.load_state_dict(saved)
            train_step(model, optimizer, worker_batch(rank, step))
            engine.step()
        engine.close()
        ends.append(flat(model))
    return torch.equal(*ends)


def test_a_resumed_run_draws_the_same_parameters(pool: Pool) -> None:
    assert all(pool.run(save_and_resume, world=2))


def end_with_nan(rank: int, world: int) -> str:
    model = Point(torch.zeros(100))
    engine = StepEngine(model, SPARTA(0.1), sync_every=1, bucket_bytes=1)
    try:
        for step in range(5):
            model.value.data.add_(float("nan") if (rank, step) == (1, 2) else 1.0)
            engine.step()
    except RuntimeError as error:
        engine.worker.group.close(error)
        return str(error)
    return "no error"


def test_a_worker_with_nan_ends_the_run(pool: Pool) -> None:
    found = pool.run(end_with_nan, world=2)
    assert "hold NaN or infinity. This worker receives only a part" in found[1]
    assert "orker 1 failed" in found[0]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fraction .* must be in \(0, 1\], got 0"):
        SPARTA(0)
    with pytest.raises(ValueError, match="got 1.5"):
        SPARTA(1.5)
    with pytest.raises(TypeError, match="seed must be an int"):
        SPARTA(seed=0.5)  # type: ignore[arg-type]
    for settings, message in (
        ({"overlap": True}, "overlap=True needs an algorithm"),
        ({"compression": "int8"}, "SPARTA sends a part of the parameters, which cannot be"),
        ({"topology": "ring"}, "takes no topology"),
    ):
        with pytest.raises(ValueError, match=message):
            loco.LocoStrategy(SPARTA(), **settings).settings.prepare(2)  # type: ignore[arg-type]
