"""FabricLocoStrategy: exact resumes, the evaluated model, and clear refusals."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_loco as loco
from lightning_loco.integrations.fabric import FabricLocoStrategy
from tests.harness.forked_jobs import Job
from tests.harness.pool import PoolEnvironment
from tests.harness.small_model import (
    TinyModule,
    flat,
    loss_of,
    make_model,
    norm_model,
    worker_batch,
)

METHODS: dict[str, Callable[[], Any]] = {
    "diloco": lambda: loco.DiLoCoStrategy(sync_every=4),
    "async_diloco": lambda: loco.AsyncDiLoCoStrategy(sync_every=4),
    "gasloc": lambda: loco.GASLoCStrategy(topology="complete", sync_every=5, momentum=0.3),
    "int8": lambda: loco.DiLoCoStrategy(sync_every=5, compression="int8"),
}
STEPS, ACCUMULATE, CLIP = 50, 2, 0.5


class Run:
    """A loop of Fabric on the small model; accumulates gradients over two batches, and clips."""

    def __init__(self, method: Any, model: nn.Module | None = None, **settings: Any) -> None:
        self.fabric = Fabric(
            strategy=FabricLocoStrategy(method),
            accelerator="cpu",
            devices=settings.pop("devices", 2),
            plugins=[PoolEnvironment()],
            **settings,
        )
        self.fabric.launch()
        raw = make_model() if model is None else model
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(raw, optimizer)
        self.step = 0
        self.strategy: Any = self.fabric.strategy

    def train(self, until: int) -> None:
        rank = self.fabric.global_rank
        for step in range(self.step, until):
            for part in range(ACCUMULATE):
                batch = worker_batch(rank, step * ACCUMULATE + part)
                is_last = part == ACCUMULATE - 1
                with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                    self.fabric.backward(loss_of(self.model, batch) / ACCUMULATE)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step = until

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def load(self, path: Path) -> None:
        state = self.state
        assert self.fabric.load(path, state) == {}
        self.step = state["step"]

    def end(self) -> list[Tensor]:
        local = flat(self.model)
        self.strategy.finish()
        return [local, flat(self.model)]


def train_fabric(rank: int, world: int, method: str, steps: int = STEPS) -> list[Tensor]:
    run = Run(METHODS[method](), devices=world)
    run.train(steps)
    return run.end()


# -------------------------------------------------------------------------------- resume


def save_and_go_on(rank: int, world: int, method: str, folder: Path, until: int) -> Any:
    run = Run(METHODS[method](), devices=world)
    run.train(until)
    run.fabric.save(folder / "a.ckpt", run.state)
    with run.strategy.consensus():
        shown = flat(run.model)
    run.train(STEPS)
    saved = torch.load(folder / "a.ckpt", weights_only=True)["model"]
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), shown)
    return run.end()


def resume(rank: int, world: int, method: str, folder: Path) -> Any:
    run = Run(METHODS[method](), devices=world)
    run.load(folder / "a.ckpt")
    run.train(STEPS)
    return run.end()


@pytest.mark.recovery
@pytest.mark.parametrize(("method", "until"), [("async_diloco", 18), ("gasloc", 20), ("int8", 7)])
def test_a_resumed_run_is_the_unbroken_one(
    pool: Any, tmp_path: Path, method: str, until: int
) -> None:
    unbroken = pool.run(train_fabric, method, world=2)
    saved = pool.run(save_and_go_on, method, tmp_path, until, world=2)
    resumed = pool.run(resume, method, tmp_path, world=2)
    for one, two, three in zip(unbroken, saved, resumed, strict=True):
        assert all(map(torch.equal, one, two)), "the save has changed the run"
        assert all(map(torch.equal, one, three))


def resume_with_more(rank: int, world: int, folder: Path) -> Any:
    context = pytest.warns(UserWarning, match="new") if rank == 0 else nullcontext()
    with context:
        run = Run(METHODS["diloco"](), devices=world)
        run.load(folder / "a.ckpt")
    assert run.strategy.engine.worker.steps == 20
    outer = run.strategy.engine.outer().clone()
    run.train(STEPS)
    return [outer, run.end()[1]]


@pytest.mark.recovery
def test_a_checkpoint_resumes_with_more_workers(pool: Any, tmp_path: Path) -> None:
    pool.run(save_and_go_on, "diloco", tmp_path, 20, world=2)
    found = pool.run(resume_with_more, tmp_path, world=3)
    assert all(torch.equal(one, found[0][0]) for one, _ in found)
    assert all(torch.equal(end, found[0][1]) for _, end in found)


def save_and_die(rank: int, world: int, folder: Path) -> None:
    """Die within a save: the checkpoint before it is complete."""
    run = Run(METHODS["async_diloco"](), devices=world)
    run.train(18)
    run.fabric.save(folder / "a.ckpt", run.state)
    run.train(22)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.fabric.save(folder / "a.ckpt", run.state)


@pytest.mark.process
def test_a_run_resumes_exactly_after_a_sigkill(pool: Any, tmp_path: Path) -> None:
    with Job(save_and_die, tmp_path, world=2) as job:
        outcome = job.outcomes([0, 1], limit_s=60.0)[0]
    assert outcome.error is not None
    assert "worker 1 (no sign of life; last seen in" in outcome.error
    unbroken = pool.run(train_fabric, "async_diloco", world=2)
    resumed = pool.run(resume, "async_diloco", tmp_path, world=2)
    for one, two in zip(unbroken, resumed, strict=True):
        assert all(map(torch.equal, one, two))


# ----------------------------------------------------------------- other uses of a loop


def use_collectives(rank: int, world: int) -> Any:
    """Workers with different numbers of batches meet at collectives."""
    run = Run(loco.DiLoCoStrategy(sync_every=3), devices=world)
    run.train(7 + 6 * rank)
    own = torch.tensor(float(rank))
    mean = run.fabric.all_reduce(own, reduce_op="mean").item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning calls what torch 2.13 deprecates
        gathered = run.fabric.all_gather(torch.tensor(rank)).tolist()
    told = run.fabric.broadcast("told" if rank == 0 else None)
    run.fabric.barrier("the end")
    rounds = run.strategy.engine.worker.round_index
    run.strategy.finish()
    run.strategy.finish()
    return mean, gathered, told, rounds, flat(run.model).tolist()


def test_collectives_wait_for_workers_with_more_batches(pool: Any) -> None:
    found = pool.run(use_collectives, world=2)
    assert found[0] == found[1]
    assert found[0][:3] == (0.5, [0, 1], "told")
    assert found[0][3] >= 3


def evaluate(rank: int, world: int) -> Any:
    run = Run(loco.LocalSGDStrategy(sync_every=100), norm_model(), devices=world)
    run.train(3)
    local = flat(run.model)
    run.model.eval()
    with run.strategy.consensus():
        shown, means = flat(run.model), run.model.module[1].running_mean.clone()
        with pytest.raises(RuntimeError, match="steps the consensus"):
            run.optimizer.step()
    assert torch.equal(flat(run.model), local)
    context = pytest.warns(UserWarning, match="consensus") if rank == 0 else nullcontext()
    with context, torch.no_grad():
        run.model(worker_batch(0, 0)[0])
    run.strategy.finish()
    return local, shown, means


def test_the_consensus_is_shown_for_a_while(pool: Any) -> None:
    (first, shown, means), (second, *others) = pool.run(evaluate, world=2)
    torch.testing.assert_close(shown, (first + second) / 2, rtol=0, atol=1e-15)
    assert torch.equal(shown, others[0])
    assert torch.equal(means, others[1])


def forget_finish(rank: int, world: int) -> None:
    run = Run(loco.DiLoCoStrategy(sync_every=3), devices=world)
    run.train(2)
    unfinished = run.strategy._unfinished
    context = (
        pytest.warns(UserWarning, match="finish.*own worker's") if rank == 0 else nullcontext()
    )
    with context:
        unfinished()  # as at the exit of the process
    run.strategy.finish()
    assert not unfinished.alive


def test_an_end_without_finish_is_warned_of(pool: Any) -> None:
    pool.run(forget_finish, world=2)


def train_replicas(rank: int, world: int) -> Any:
    run = Run(loco.DiLoCoStrategy(sync_every=3, replica_size=2), devices=world)
    run.train(8)
    local = flat(run.model)
    with run.strategy.consensus():
        shown = flat(run.model)
    run.strategy.finish()
    return local, shown


def test_the_ranks_of_a_worker_average_their_gradients(pool: Any) -> None:
    found = pool.run(train_replicas, world=4)
    locals_, shown = zip(*found, strict=True)
    assert torch.equal(locals_[0], locals_[1])
    assert torch.equal(locals_[2], locals_[3])
    assert not torch.equal(locals_[0], locals_[2])
    assert all(torch.equal(one, shown[0]) for one in shown)


def train_other(rank: int, world: int, method: str) -> Any:
    run = Run(method, devices=world)
    run.train(6)
    run.fabric.barrier()
    end = run.end()
    return end[1]


OTHERS = ["async_model_average", "pairwise_gossip", "delayed_nesterov", "decoupled_diloco"]


@pytest.mark.parametrize("method", OTHERS)
def test_methods_by_name(pool: Any, method: str) -> None:
    first, second = pool.run(train_other, method, world=2)
    assert torch.equal(first, second)


def other_weights(rank: int, world: int) -> Any:
    """Weights that are written or loaded before the first step are where the rounds start."""
    run = Run(loco.DiLoCoStrategy(sync_every=3), devices=world)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0 + rank)
    run.train(1)
    return run.strategy.engine.outer().tolist(), run.end()[1].tolist()


def test_weights_of_worker_0_are_the_start(pool: Any) -> None:
    (outer, end), other = pool.run(other_weights, world=2)
    assert set(outer) == {1.0}
    assert (outer, end) == other


def two_models(rank: int, world: int) -> None:
    run = Run(loco.DiLoCoStrategy(), devices=world)
    other = make_model(1)
    other, optimizer = run.fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="ModuleDict"):
        run.model(worker_batch(0, 0)[0])
    run.strategy.teardown()


class WithStep(TinyModule):
    """The small model, whose loss Fabric's loop gets from ``training_step``."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        return loss_of(self.model, batch)


def train_step_of_module(rank: int, world: int) -> Tensor:
    run = Run(loco.DiLoCoStrategy(sync_every=2), WithStep(), devices=world)
    for step in range(5):
        run.fabric.backward(run.model.training_step(worker_batch(rank, step)))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.strategy.engine.worker.round_index == 2
    run.fabric.backward(loss_of(run.model.module.model, worker_batch(rank, 9)))
    with pytest.raises(RuntimeError, match="no forward pass went through"):
        run.optimizer.step()
    return run.end()[1]


def test_training_step_is_a_forward_pass(pool: Any) -> None:
    first, second = pool.run(train_step_of_module, world=2)
    assert torch.equal(first, second)


def step_by_closure(rank: int, world: int) -> Tensor:
    strategy = FabricLocoStrategy(loco.LocalSGDStrategy(sync_every=2))
    fabric = Fabric(
        strategy=strategy, accelerator="cpu", devices=world, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, worker_batch(rank, 0))
        fabric.backward(loss)
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert fabric.strategy.engine.worker.round_index == 2
    fabric.strategy.finish()
    return flat(model)


def test_optimizers_with_closures(pool: Any) -> None:
    first, second = pool.run(step_by_closure, world=2)
    assert torch.equal(first, second)


def test_two_models_are_refused(pool: Any) -> None:
    pool.run(two_models, world=2)


def wrapped_twice(rank: int, world: int) -> None:
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match=r"fabric\.setup\(model\.module, optimizer\)"):
        Run(loco.DiLoCoStrategy(), wrapped, devices=world)


def test_a_model_in_ddp_is_refused(pool: Any) -> None:
    pool.run(wrapped_twice, world=2)


def train_by_name(rank: int, world: int) -> None:
    environment = PoolEnvironment()
    fabric = Fabric(strategy="gasloc", accelerator="cpu", devices=1, plugins=[environment])
    assert isinstance(fabric.strategy, FabricLocoStrategy)
    fabric.launch()
    model = make_model()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(loss_of(module, worker_batch(0, 0)))
    optimizer.step()
    fabric.strategy.finish()
    assert not torch.equal(flat(model), flat(make_model()))


def test_names_are_registered(pool: Any) -> None:
    pool.run(train_by_name, world=1)


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        (lambda: "gaslock", ValueError, "no method 'gaslock'"),
        (lambda: loco.RemoteOptimizerStrategy(), ValueError, "RemoteOptimizerStrategy"),
        (lambda: loco.LocoModelParallelStrategy(), TypeError, "DiLoCoStrategy"),
        (lambda: loco.DiLoCo(), TypeError, "must be a strategy of lightning_loco"),
        (
            lambda: loco.DiLoCoStrategy(membership=loco.Elastic("localhost:1")),
            ValueError,
            "membership",
        ),
        (lambda: loco.DiLoCoStrategy(checkpoint_folder="private"), ValueError, "private"),
    ],
)
def test_what_does_not_work_is_refused(
    method: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        FabricLocoStrategy(method())


def test_a_strategy_of_the_trainer_is_refused_with_the_right_line() -> None:
    with pytest.raises(Exception, match="FabricLocoStrategy"):
        Fabric(strategy=loco.DiLoCoStrategy(), accelerator="cpu", devices=1)
