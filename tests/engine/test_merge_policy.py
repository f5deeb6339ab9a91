"""Merge policies: late results keep local steps taken in the meantime, or restart them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, LocoStrategy, ModelAverage, StepEngine
from lightning_loco.algorithms import (
    Algorithm,
    KeepProgress,
    MergePolicy,
    Mix,
    NeighborAverage,
    Restart,
    RoundInfo,
    State,
)
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import get_topology
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.rounds import LARGE, approach, simulate, train, zeros
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.harness.toys import Point, assert_close, randn

ROUNDS = 4
WORLD = 3
SYNC_EVERY = 2


def test_restarting_takes_the_result() -> None:
    result, local = torch.tensor([7.0, 8.0]), torch.tensor([1.0, 2.0])
    assert Restart().merge(result, local, None) is result


def test_progress_made_meanwhile_is_kept() -> None:
    result, local = torch.tensor([7.0, 8.0]), torch.tensor([1.0, 2.0])
    sent_params = torch.tensor([0.5, 0.0])
    merged = KeepProgress().merge(result, local, sent_params)
    assert merged is sent_params  # it keeps exactly what was written
    assert merged.tolist() == [7.5, 10.0]


def test_results_are_mixed_with_what_is_local_now() -> None:
    result, local = torch.tensor([7.0, 8.0]), torch.tensor([1.0, 2.0])
    assert Mix(0.25).merge(result, local.clone(), None).tolist() == [5.5, 6.5]
    assert torch.equal(Mix(1.0).merge(result, local.clone(), None), local)
    assert Mix(0.0).merge(result, local * math.nan, None) is result
    assert result.tolist() == [7.0, 8.0]
    kept = [
        merge_policy.keeps_sent_params(True)
        for merge_policy in (Restart(), KeepProgress(), Mix(0.5))
    ]
    assert kept == [False, True, True]
    kept = [
        merge_policy.keeps_sent_params(False)
        for merge_policy in (Restart(), KeepProgress(), Mix(0.5))
    ]
    assert kept == [False, True, False]


def begin(rank: int, world: int, algorithm: Algorithm, broken: bool) -> list[float]:
    """Return the parameters from which local steps continue while a first round is pending."""
    model = Point(torch.zeros(2))
    engine = StepEngine(model, algorithm, sync_every=1, overlap=True, warm_start=False)
    model.value.data.copy_(torch.tensor([1.0, math.nan if broken and rank else 2.0]))
    engine.step()
    values: list[float] = model.value.tolist()
    engine.close()
    return values


def test_where_local_steps_go_on(pool: Pool, subtests: pytest.Subtests) -> None:
    rows: list[tuple[Algorithm, bool, list[float]]] = [
        (DiLoCo(0.5, 0.0), False, [0.0, 0.0]),
        (GASLoC(), False, [1.0, 2.0]),
        (GASLoC(), True, [0.0, 0.0]),
        (ModelAverage(), False, [1.0, 2.0]),
        (ModelAverage(), True, [1.0, math.nan]),  # the start is not kept in the state
    ]
    calls = {(algorithm, broken): (algorithm, broken) for algorithm, broken, _ in rows}
    results = run_each(pool, begin, calls, world=2)
    for algorithm, broken, expected in rows:
        with subtests.test(str(algorithm), broken=broken):
            whole, last = results[algorithm, broken]
            assert_close(torch.tensor(last), torch.tensor(expected), equal_nan=True)
            if broken:
                assert whole == [1.0, 2.0]


def test_algorithms_get_the_merge_policy_they_name(subtests: pytest.Subtests) -> None:
    rows: list[tuple[Algorithm, MergePolicy]] = [
        (DiLoCo(), Restart()),
        (LocalSGD(), Restart()),
        (GASLoC(), KeepProgress()),
        (ModelAverage(), KeepProgress()),
        (NeighborAverage(), KeepProgress()),
    ]
    for algorithm, merge_policy in rows:
        with subtests.test(str(algorithm)):
            assert RoundSettings(algorithm).prepare(num_workers=2).merge_policy == merge_policy


def test_a_merge_policy_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"such as KeepProgress\(\), got 'restart'"):
        RoundSettings(DiLoCo(), merge_policy="restart").prepare(2)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ plain loops


def approached(params: Tensor, targets: Tensor) -> Tensor:
    for _ in range(SYNC_EVERY):
        params = params + 0.1 * (targets - params)
    return params


def averaged_late(warm_start: bool) -> Tensor:
    """theta <- mean(s) + (theta - s), one round late: ``(ROUNDS + 1, N, P)``."""
    targets = torch.stack([randn(LARGE, seed=10 * worker) for worker in range(WORLD)])
    params = torch.zeros_like(targets)
    snapshot: Tensor | None = None
    history = []
    for t in range(ROUNDS):
        params = approached(params, targets)
        if snapshot is not None:
            params = snapshot.mean(0) + (params - snapshot)
        snapshot = params.clone()
        if t == 0 and warm_start:
            params, snapshot = params.mean(0).expand(WORLD, -1), None
        history.append(params)
    assert snapshot is not None
    params = snapshot.mean(0) + (params - snapshot)
    return torch.stack([*history, params.mean(0).expand(WORLD, -1)])


def gossiped_late(algorithm: GASLoC, warm_start: bool) -> Tensor:
    """Apply each gossip round when the next message is sent: ``(ROUNDS + 1, N, P)``."""
    matrix = get_topology("ring").mixing_matrix(WORLD)
    targets = torch.stack([randn(LARGE, seed=10 * worker) for worker in range(WORLD)])
    start = torch.zeros_like(targets)
    local, before = start, start  # u_{-1} = theta_0
    pending: tuple[Tensor, Tensor] | None = None

    def apply(u: Tensor, before: Tensor) -> Tensor:
        return u + algorithm.gossip_step * (matrix @ u - u) + algorithm.momentum * (u - before)

    history = []
    for t in range(ROUNDS):
        local = approached(local, targets)
        if pending is not None:
            u, sent_params = pending
            start, progress = apply(u, before), local - sent_params
            local, before = start + progress, u
        u = start + algorithm.outer_lr * (local - start)
        pending = u, local
        if t == 0 and warm_start:
            start, before, pending = apply(u, before), u, None
            local = start
        history.append(local)
    assert pending is not None
    u, sent_params = pending
    local = apply(u, before) + (local - sent_params)
    return torch.stack([*history, local.mean(0).expand(WORLD, -1)])


@pytest.mark.parametrize("warm_start", [True, False])
def test_overlapped_averaging_is_its_formula_one_round_late(pool: Pool, warm_start: bool) -> None:
    settings = RoundSettings(ModelAverage(), EverySteps(SYNC_EVERY, True, warm_start))
    expected = averaged_late(warm_start)
    assert_close(simulate(settings, WORLD, ROUNDS), expected)
    assert_close(torch.stack(pool.run(train, settings, ROUNDS, world=WORLD), dim=1), expected)


@pytest.mark.parametrize("warm_start", [True, False])
def test_overlapped_gossip_is_its_formula_one_round_late(pool: Pool, warm_start: bool) -> None:
    algorithm = GASLoC(0.7, 0.8, 0.3, "local")
    schedule = EverySteps(SYNC_EVERY, True, warm_start)
    settings = RoundSettings(algorithm, schedule, "ring")
    expected = gossiped_late(algorithm, warm_start)
    assert_close(simulate(settings, WORLD, ROUNDS), expected)
    assert_close(torch.stack(pool.run(train, settings, ROUNDS, world=WORLD), dim=1), expected)


def gossip_still(rank: int, world: int, overlap: bool) -> Tensor:
    """Run rounds without local steps, from different starts."""
    model = Point(torch.zeros(4, dtype=torch.float64))
    engine = StepEngine(
        model, GASLoC(1.0), sync_every=1, overlap=overlap, warm_start=False, topology="ring"
    )
    model.value.data.copy_(randn(4, seed=rank))
    engine.step()
    if overlap:
        engine.fragments[0].apply(engine.worker.steps)
    history = [flat(model)]
    for _ in range(4):
        engine.step()
        if overlap:  # immediately, so that results are as early as without overlap
            engine.fragments[0].apply(engine.worker.steps)
        history.append(flat(model))
    engine.close()
    return torch.stack(history)


def test_overlapped_gossip_without_progress_is_plain_gossip(pool: Pool) -> None:
    plain = pool.run(gossip_still, False, world=WORLD)
    for late, expected in zip(pool.run(gossip_still, True, world=WORLD), plain, strict=True):
        assert_close(late, expected)


# ------------------------------------------------------------------------------ strategies


def fit(rank: int, world: int, algorithm: Algorithm) -> Tensor:
    strategy = LocoStrategy(algorithm, sync_every=3)
    trainer = make_trainer(strategy, max_steps=11, use_distributed_sampler=False)
    module = TinyModule()
    trainer.fit(module, make_loader(rank, 11))
    return flat(module)


def test_averaging_that_ends_at_once_is_local_sgd_bit_for_bit(pool: Pool) -> None:
    local_sgd = pool.run(fit, LocalSGD(), world=2)
    for result, expected in zip(pool.run(fit, ModelAverage(), world=2), local_sgd, strict=True):
        assert torch.equal(result, expected)


def serve_others_and_go_on(rank: int, world: int) -> float:
    """Let worker 0 finish its first epoch early and take part in the others' rounds."""
    model = Point(torch.zeros(1, dtype=torch.float64))
    engine = StepEngine(model, NeighborAverage(), sync_every=2, overlap=True, topology="complete")
    for epoch_steps in (2 + 4 * rank, 4):
        for _ in range(epoch_steps):
            model.value.data.add_(rank + 1.0)
            engine.step()
        engine.sync_point("the end of an epoch")
    engine.finish()
    engine.close()
    return model.value.item()


def test_steps_made_while_a_round_without_own_progress_travels_are_kept(pool: Pool) -> None:
    """Gossip keeps the mean, so the consensus is the mean of all added progress."""
    total = sum((rank + 1.0) * (2 + 4 * rank + 4) for rank in range(3))
    for result in pool.run(serve_others_and_go_on, world=3):
        assert result == pytest.approx(total / 3, abs=1e-12)


@dataclasses.dataclass(frozen=True)
class Impatient(Algorithm):
    """Applies its own progress when it sends, and the mean times the number of sends."""

    exchange = "mean"
    start_key = "outer"
    merge_policy = Restart()

    def init(self, params: Tensor) -> State:
        return {"outer": params, "sends": 0}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return torch.sub(state["outer"], params, out=params)

    def on_send(
        self,
        message: Tensor,
        ended: tuple[Tensor | None, Tensor | None, Tensor] | None,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert (ended is None) == (state["sends"] == 0)
        state["sends"] += 1
        return state["outer"].sub_(message)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        return state["outer"].sub_(received, alpha=state["sends"])


def test_an_algorithm_says_where_steps_go_on_when_a_message_leaves(pool: Pool) -> None:
    """In processes and in the simulation, with several buckets, and after a resume."""
    settings = RoundSettings(Impatient(), EverySteps(SYNC_EVERY, overlap=True, warm_start=False))
    models = [zeros() for _ in range(WORLD)]
    rows = []
    for _ in range(ROUNDS):
        for worker, model in enumerate(models):
            for _ in range(SYNC_EVERY):
                approach(worker, model)
        rows.append(torch.stack([flat(model) for model in models]))
    last = rows[-1] - rows[-2]
    end = (rows[-1] + ROUNDS * last.mean(0)).mean(0)
    expected = torch.stack([*rows, end.expand_as(last)])
    assert_close(simulate(settings, WORLD, ROUNDS), expected)
    rows = {after: (settings, ROUNDS, zeros, after) for after in (None, 1, 3)}
    unbroken, *others = run_each(pool, train, rows, world=WORLD).values()
    assert_close(torch.stack(unbroken, dim=1), expected)
    assert all(torch.equal(torch.stack(one), torch.stack(unbroken)) for one in others)
