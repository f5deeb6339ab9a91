"""PairwiseGossipStrategy with workers of several ranks; the first rank of a worker fetches."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_loco import PairwiseAverage, PairwiseEngine, PairwiseGossipStrategy, PeerMonitor
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.distributed import WorkerGroup
from tests.harness.gossip_nodes import peers
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    flat,
    loss_of,
    make_model,
    norm_model,
    train_step,
    worker_batch,
)
from tests.strategies.families import MOST_PARTS, TOLERANCE, loader
from tests.strategies.test_other_numbers import RecordStart

SIZE = 2  # ranks of a worker
STEPS = 12


def fetch_in_lock_step(engine: PairwiseEngine) -> None:
    """Let every fetch of two workers return what the peer published in the same local step."""
    if engine.worker.group.place > 0:
        return
    group, node = engine.worker.group, engine.node
    start_fetch = node.start_fetch

    def fetch() -> None:
        group.gather_objects(None, "all have published")
        start_fetch()
        while not node.has_ended:
            time.sleep(0.001)
        group.gather_objects(None, "all have fetched")
        engine._exchange.publisher._next_time = 0.0

    node.start_fetch = fetch  # type: ignore[method-assign]


class LockStep(pl.Callback):
    """Makes runs of two workers repeatable."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        fetch_in_lock_step(trainer.strategy.engine)  # type: ignore[attr-defined]


class Recorder(pl.Callback):
    """Records the parameters after every local step, and the engine's counters."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.counts: list[Any] = []
        self.buffers: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        self.params.append(flat(module))
        self.buffers += [buffer.clone() for buffer in module.buffers()]
        self.counts.append(
            (engine.worker.steps, engine.statistics.rounds, engine._clock, list(engine.factors))
        )


class Result(NamedTuple):
    """Results of a fit on one rank."""

    params: list[Tensor]
    counts: list[Any]
    final: Tensor
    buffers: list[Tensor]


def fit(
    rank: int,
    world: int,
    replica_size: int,
    arguments: dict[str, Any],
    make_module: Callable[[], pl.LightningModule] = TinyModule,
    callbacks: tuple[pl.Callback, ...] = (LockStep(),),
    num_steps: list[int] | int = STEPS,
    settings: dict[str, Any] | None = None,
    resume: str | None = None,
) -> Result:
    recorder = Recorder()
    strategy = PairwiseGossipStrategy(
        **{
            "fetch_probability": 1.0,
            "timeout_s": 30,
            "replica_size": replica_size,
            "finalize": "keep",
            **arguments,
        }
    )
    trainer = make_trainer(
        strategy,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **(settings or {})},
        use_distributed_sampler=False,
        callbacks=[*callbacks, recorder],
    )
    module = make_module()
    length = num_steps if isinstance(num_steps, int) else num_steps[rank // replica_size]
    validation = loader(rank, replica_size, 2) if isinstance(module, ValidatedModule) else None
    trainer.fit(module, loader(rank, replica_size, length), validation, ckpt_path=resume)
    return Result(recorder.params, recorder.counts, flat(module), recorder.buffers)


def check_places(results: list[Result]) -> None:
    """Check that the ranks of a worker are equal bit for bit after every local step."""
    for first, other in zip(results[::SIZE], results[1::SIZE], strict=True):
        assert len(first.params) == len(other.params) > 0
        assert all(map(torch.equal, first.params, other.params))
        assert all(map(torch.equal, first.buffers, other.buffers))
        assert first.counts == other.counts
        assert torch.equal(first.final, other.final)


# ------------------------------------------------------------------------- a plain loop


def plain_loop(average: PairwiseAverage) -> list[list[Tensor]]:
    """Return the parameters of two workers after each local step, with the rows of both ranks."""
    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    clocks, losses = [0.0, 0.0], [0.0, 0.0]
    found: list[list[Tensor]] = [[], []]
    for step in range(STEPS):
        clocks = [clock + 1 for clock in clocks]
        published = [flat(model).clone() for model in models]
        tags = [Tag(*pair) for pair in zip(clocks, losses, strict=True)]
        is_published = step > 0 or not average.uses_loss
        for worker, model in enumerate(models):
            batches = [worker_batch(MOST_PARTS * worker + place, step) for place in range(SIZE)]
            losses[worker] = sum(loss_of(model, batch).item() for batch in batches) / SIZE
            train_step(model, optimizers[worker], *batches)
            found[worker].append(flat(model).clone())
        if not is_published:
            continue
        for worker, model in enumerate(models):
            own, peer = Tag(clocks[worker], losses[worker]), tags[1 - worker]
            factor = average.blend_factor(own, peer)
            now = flat(model)
            base = published[worker].clone() if average.keep_progress else now.clone()
            progress = now - base
            average.blend(base, published[1 - worker], factor)
            torch.nn.utils.vector_to_parameters(base + progress, model.parameters())
            clocks[worker] = average.blended_clock(own.clock, peer.clock, factor)
    return found


RULES: dict[str, dict[str, Any]] = {
    "constant": {"factor": 0.3, "keep_progress": False},
    "loss": {"interpolation": "loss", "keep_progress": False},
    "clock": {"interpolation": "clock"},
    "threshold": {"divergence_threshold": 2.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_two_ranks_are_one_worker_of_a_plain_loop(pool: Pool, rule: str) -> None:
    expected = plain_loop(PairwiseAverage(**RULES[rule]))
    several = pool.run(fit, SIZE, RULES[rule], world=4)
    check_places(several)
    one = pool.run(fit, 1, RULES[rule], world=2)
    for results, size in ((several, SIZE), (one, 1)):
        for rank, result in enumerate(results):
            for step, own in enumerate(expected[rank // size]):
                torch.testing.assert_close(
                    result.params[step], own, rtol=0, atol=TOLERANCE, msg=f"{rank}, step {step}"
                )
            steps, rounds, _, factors = result.counts[-1]
            assert (steps, rounds) == (STEPS, STEPS - 1 - PairwiseAverage(**RULES[rule]).uses_loss)
            assert any(factors)
    assert (expected[0][-1] - expected[1][-1]).abs().max() > 1e-4


# ------------------------------------------------------------------- free running workers


class Slow(pl.Callback):
    """Slows steps down, so that fetches can complete."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.002)


class Normalized(ValidatedModule):
    """A module with BatchNorm, whose statistics are blended as well."""

    def __init__(self) -> None:
        super().__init__()
        self.model = norm_model()


def test_uneven_workers_with_validations_and_accumulated_gradients(pool: Pool) -> None:
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2}
    results = pool.run(
        fit, SIZE, {"finalize": "average"}, Normalized, (Slow(),), [30, 44], settings, world=4
    )
    for first, other in zip(results[::SIZE], results[1::SIZE], strict=True):
        assert all(map(torch.equal, first.params, other.params))
        assert first.counts == other.counts
        assert first.counts[-1][1] > 3
    assert [result.counts[-1][0] for result in results] == [30, 30, 44, 44]
    assert all(torch.equal(result.final, results[0].final) for result in results)


class Gan(TinyModule):
    """Manual optimization with several local steps in a batch, and no returned loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.model, batch))
            optimizer.step()


def test_manual_optimization(pool: Pool) -> None:
    results = pool.run(fit, SIZE, {"fetch_probability": 0.7}, Gan, (Slow(),), 40, world=4)
    check_places(results)
    assert all(result.counts[-1][:1] == (80,) and result.counts[-1][1] > 3 for result in results)


def test_a_single_worker_of_two_ranks(pool: Pool) -> None:
    results = pool.run(fit, SIZE, {}, world=2)
    check_places(results)
    assert results[0].counts[-1][1] == 0


class LossOfNaN(TinyModule):
    """One rank has a NaN loss once, which would stay in the optimizer."""

    def __init__(self) -> None:
        super().__init__(optimizer="Adam", lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_broken = (self.trainer.global_rank, batch_idx) == (1, 3)
        return loss * math.nan if is_broken else loss


@pytest.mark.recovery
def test_a_worker_with_nan_takes_the_parameters_of_its_peer(pool: Pool) -> None:
    """The mean of the gradients spreads NaN to all ranks of the worker."""
    results = pool.run(fit, SIZE, {}, LossOfNaN, world=4)
    finite = [[bool(p.isfinite().all()) for p in result.params] for result in results]
    assert finite[0] == finite[1] == [step not in (3, 4) for step in range(STEPS)]
    assert all(finite[2] + finite[3])
    for first, other in zip(results[::SIZE], results[1::SIZE], strict=True):
        assert all(map(torch.equal, first.params[5:], other.params[5:]))
        assert first.counts == other.counts
    assert [result.counts[-1][3].count(1.0) for result in results] == [1, 1, 0, 0]


class WritesNaN(pl.Callback):
    """Writes NaN into the parameters of one rank, not the first of its worker."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (1, 3):
            module.model[0].weight.data[0, 0] = math.nan


def test_a_blend_replaces_what_one_rank_has_written(pool: Pool) -> None:
    check_places(pool.run(fit, SIZE, {}, TinyModule, (LockStep(), WritesNaN()), world=4))


# ----------------------------------------------------------------------- statistics


def monitor(rank: int, world: int) -> dict[str, Any]:
    strategy = PairwiseGossipStrategy(1.0, replica_size="node", timeout_s=30)
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[LockStep(), PeerMonitor()],
        log_every_n_steps=1,
        devices=SIZE,
        num_nodes=world // SIZE,
        plugins=[PoolEnvironment(num_nodes=world // SIZE)],
    )
    trainer.fit(TinyModule(), loader(rank, SIZE))
    return {
        "logged": {k: float(v) for k, v in trainer.logged_metrics.items()},
        "bytes": strategy.statistics.bytes_sent,
        "names": (strategy.worker, strategy.place, strategy.num_workers),
    }


def test_peers_are_workers(pool: Pool) -> None:
    results = pool.run(monitor, world=4)
    assert [one["names"] for one in results] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    for one in results[::SIZE]:
        assert one["logged"]["loco/fetches"] == STEPS
        assert one["logged"]["loco/blend_factor"] == pytest.approx(0.3)
        assert one["bytes"] > 0
    for one in results[1::SIZE]:
        assert one["logged"] == {}


# ------------------------------------------------------------------ separate Trainers


class Peer(pl.Callback):
    """Serves other parameters on rank 0, like another node."""

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes
        self.engine: PairwiseEngine | None = None

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            model = TinyModule()
            torch.nn.init.zeros_(model.model[0].weight)
            alone = WorkerGroup(0, 1)
            self.engine = PairwiseEngine(
                model, PairwiseAverage(1.0), nodes=self.nodes, name="w1", group=alone
            )
            self.engine.update_send(1.0)

    def on_train_end(self, *_: Any) -> None:
        if self.engine is not None:
            self.engine.close()


def fit_node(
    rank: int,
    world: int,
    size: int,
    nodes: list[Any],
    path: str | None = None,
    resume: str | None = None,
) -> Any:
    arguments = {"nodes": nodes, "name": "w0", "factor": 0.5}
    start = RecordStart(path, 6)
    callbacks = Slow(), Peer(nodes), start
    result = fit(rank, world, size, arguments, callbacks=callbacks, num_steps=60, resume=resume)
    return result, start.seen


@pytest.mark.recovery
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that")
def test_the_ranks_of_a_trainer_are_one_node(pool: Pool, tmp_path: Path) -> None:
    nodes, path = peers(2, "w"), str(tmp_path / "one.ckpt")
    results = [result for result, _ in pool.run(fit_node, SIZE, nodes, path, world=2)]
    check_places(results)
    assert results[0].counts[-1][1] > 3
    again = pool.run(fit_node, SIZE, nodes, None, path, world=2)
    check_places([result for result, _ in again])
    for _, start in again:
        assert torch.equal(start["params"], results[0].params[5])
    assert again[0][1]["engine"]["clock"] == results[0].counts[5][2]


def samplers(rank: int, world: int) -> list[dict[str, int]]:
    found = []
    for name in ("w0", "w1"):
        strategy = PairwiseGossipStrategy(1.0, nodes=peers(2, "w"), name=name, replica_size=SIZE)
        make_trainer(strategy)
        strategy.set_world_ranks()
        found.append(strategy.distributed_sampler_kwargs)
    return found


def test_the_ranks_of_all_nodes_divide_the_data(pool: Pool) -> None:
    results = pool.run(samplers, world=2)
    ranks = [kwargs["rank"] for kwargs in (*(r[0] for r in results), *(r[1] for r in results))]
    assert ranks == [0, 1, 2, 3]
    assert all(kwargs["num_replicas"] == 4 for result in results for kwargs in result)


def test_a_node_is_one_worker(pool: Pool) -> None:
    for size, world, text in (
        (2, 4, "this one has 2. Use devices=1, make its 4 ranks one worker with replica_size=4"),
        (1, 2, "this one has 2. Use devices=1, make its 2 ranks one worker with replica_size=2"),
    ):
        with pytest.raises(PoolError, match=re.escape(text)):
            pool.run(fit_node, size, peers(2, "w"), world=world)


# ----------------------------------------------------------------------- plain PyTorch


def blend_by_hand(rank: int, world: int, waits: bool) -> dict[str, Any]:
    group = WorkerGroup.create(timeout_s=30, replica_size=SIZE)
    model = make_model()
    engine = PairwiseEngine(model, PairwiseAverage(1.0, "loss"), group=group)
    fetch_in_lock_step(engine)
    torch.nn.init.constant_(model[0].weight, float(group.worker))
    factors = []
    for _ in range(2):  # peers read nothing before the first loss is known
        engine.update_send(loss=1.0 + group.worker + group.place)
        if waits:
            factors.append(engine.update_wait())
        else:
            factors.append(engine.factors[-1] if engine.step() else 0.0)
    try:
        node = str(engine.node.port > 0)
    except RuntimeError as error:
        node = str(error)
    engine.close()
    return {"factors": factors, "weight": model[0].weight.detach().clone(), "node": node}


@pytest.mark.parametrize("waits", [True, False])
def test_the_loss_is_the_mean_over_the_ranks(pool: Pool, waits: bool) -> None:
    results = pool.run(blend_by_hand, waits, world=4)
    for rank, one in enumerate(results):
        own, peer = (1.5, 2.5) if rank < SIZE else (2.5, 1.5)
        assert one["factors"] == [0.0, own / (own + peer)]
        assert torch.equal(one["weight"], results[rank // SIZE * SIZE]["weight"])
        assert float(one["weight"][0, 0]) == pytest.approx(0.375)
    assert [one["node"] for one in results[::SIZE]] == ["True", "True"]
    assert "Use the node of place 0" in results[1]["node"]
