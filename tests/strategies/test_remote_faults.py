"""A remote optimizer before the first step, and with ranks that are lost or stopped."""

from __future__ import annotations

import json
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.parameter_server import Tiers
from tests.harness.pool import Pool, PoolError
from tests.harness.programs import LIMIT_S, Program, one_per_rank, python_script
from tests.harness.small_model import TinyModule, ValidatedModule, make_loader
from tests.strategies.families import all_ranks, fit_with, remote_or_ddp, remote_trainer

STEPS = 4
START_S = 2.0
"""Timeout of runs that begin late."""


class Listing(torch.optim.SGD):
    """Has a list in its state."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1]


class Lists(TinyModule):
    def configure_optimizers(self) -> Any:
        return Listing(self.parameters(), lr=0.1)


class FrozenComplex(TinyModule):
    """Its complex parameter is frozen, so it is not sent."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)


def fit(rank: int, world: int, module: TinyModule) -> None:
    fit_with(remote_or_ddp(2), module, make_loader(rank, STEPS))


@pytest.mark.filterwarnings("ignore:Checkpoints after fit have no optimizer state")
def test_a_state_that_cannot_be_sent_works_without_checkpoints(pool: Pool) -> None:
    pool.run(fit, Lists(), world=4)


def test_frozen_complex_parameters_are_allowed(pool: Pool) -> None:
    pool.run(fit, FrozenComplex(), world=3)


# ----------------------------------------------------------------- before the first step


class SlowHook(TinyModule):
    """Exceeds the timeout in a hook before training, on workers or service ranks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def prepare_data(self) -> None:
        self.delay("prepare_data")

    def setup(self, stage: str) -> None:
        self.delay("setup")

    def delay(self, hook: str) -> None:
        serves = self.trainer.strategy.serves  # type: ignore[attr-defined]
        if self.hook == (f"{hook} where it serves" if serves else hook):
            time.sleep(1.5 * START_S)


def fit_late(rank: int, world: int, hook: str, between_s: float) -> int:
    with all_ranks(num_nodes=world // 2) as environment:  # the second node serves, if there is one
        for _ in range(2 if between_s else 1):
            strategy = RemoteOptimizerStrategy(2, timeout_s=START_S)
            nodes = {"num_nodes": environment.num_nodes, "devices": world // environment.num_nodes}
            settings: Any = {"max_epochs": 1, "use_distributed_sampler": False, **nodes}
            trainer = remote_trainer(environment, strategy, **settings)
            trainer.fit(SlowHook(hook), make_loader(rank, STEPS))
            if rank < 2:
                time.sleep(between_s)
        return trainer.global_step


@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize(
    ("hook", "between_s", "world"),
    [
        ("prepare_data", 0.0, 3),
        ("prepare_data where it serves", 0.0, 4),
        ("setup", 0.0, 3),
        ("between two fits", 1.5 * START_S, 3),
    ],
)
def test_training_may_start_later_than_the_timeout(
    pool: Pool, hook: str, between_s: float, world: int
) -> None:
    assert pool.run(fit_late, hook, between_s, world=world)[:2] == [STEPS, STEPS]


class FailsBefore(TinyModule):
    """Raises an error in a hook before training, on one rank."""

    def __init__(self, hook: str, victim: int) -> None:
        super().__init__()
        self.hook = hook
        self.victim = victim

    def fail_in(self, hook: str) -> None:
        if hook == self.hook and self.trainer.global_rank == self.victim:
            raise LookupError("no such file")

    def prepare_data(self) -> None:
        self.fail_in("prepare_data")

    def setup(self, stage: str) -> None:
        self.fail_in("setup")

    def configure_optimizers(self) -> Any:
        self.fail_in("configure_optimizers")
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        self.fail_in("train_dataloader")
        return make_loader(self.trainer.global_rank, STEPS)


def fail_before(rank: int, world: int, hook: str, victim: int) -> None:
    fit_with(remote_or_ddp(2), FailsBefore(hook, victim))


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("hook", "victim"),
    [
        ("prepare_data", 0),
        ("setup", 1),
        ("setup", 2),
        ("configure_optimizers", 0),
        ("train_dataloader", 1),
    ],
)
def test_an_error_before_training_is_named_on_all_ranks(pool: Pool, hook: str, victim: int) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(fail_before, hook, victim, world=3)
    assert set(caught.value.failures) == {0, 1, 2}
    name = Tiers.detect(3, 2).name(victim)
    for rank, failure in caught.value.failures.items():
        assert "no such file" in failure.message
        assert rank == victim or name in failure.message.lower()


# ----------------------------------------------------------------- one program per rank

SCRIPT = """
import os, sys, time
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_loco import RemoteOptimizerStrategy
from lightning.pytorch.plugins.environments import LightningEnvironment
from tests.harness.small_model import ValidatedModule, WorkerData, make_loader, quiet_trainer
from torchdata.stateful_dataloader import StatefulDataLoader

class Slow(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            print("five steps done", flush=True)
        time.sleep(0.02)

SAVE = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)

def main():
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    module = ValidatedModule(optimizer="Adam")
    trainer = quiet_trainer(
        strategy=RemoteOptimizerStrategy({options}), enable_checkpointing=True,
        devices={world}, max_epochs=1, callbacks=[Slow(), SAVE],
        use_distributed_sampler=False, default_root_dir={folder!r}, num_sanity_val_steps=0,
    )
    loader = StatefulDataLoader(WorkerData(rank, {steps}), batch_size=None)
    try:
        trainer.fit(module, loader, make_loader(9, 2), ckpt_path={ckpt_path!r})
    finally:
        print("ended at", time.monotonic(), flush=True)
    print(f"rank {{rank}} finished at {{trainer.global_step}} losses {{module.losses}}", flush=True)

if __name__ == "__main__":
    main()
"""


def running(
    folder: Path,
    world: int,
    steps: int,
    ckpt_path: str | None = None,
    **options: Any,
) -> AbstractContextManager[list[Program]]:
    """Start one program per rank."""
    words = {"num_workers": 2, "timeout_s": 15, **options}
    text = SCRIPT.format(
        options=", ".join(f"{name}={value!r}" for name, value in words.items()),
        world=world,
        steps=steps,
        folder=str(folder),
        ckpt_path=ckpt_path,
    )
    return one_per_rank(python_script(folder, text), world, folder)


def finish(programs: list[Program], limit_s: float = LIMIT_S) -> tuple[list[int], list[str]]:
    """Wait for all programs; return exit codes and outputs."""
    deadline = time.monotonic() + limit_s
    ends = [program.finish(max(deadline - time.monotonic(), 1)) for program in programs]
    return [code for code, _ in ends], [text for _, text in ends]


TIMEOUT_S = 5.0
LONGEST_S = TIMEOUT_S + 6


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_end_without_worker_0_which_hosts_the_store(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with running(tmp_path, 4, 2000, num_workers=3, timeout_s=TIMEOUT_S) as programs:
        programs[0].wait_for("five steps done")
        time.sleep(0.3)
        began = time.monotonic()
        programs[0].signal(signum)
        for code, text in zip(*finish(programs[1:]), strict=True):
            assert code == 1, text[-3000:]
            assert "worker 0" in text.rpartition("Traceback (most recent")[2].lower(), text[-3000:]
            ended_at = float(text.partition("ended at ")[2].split()[0])
            assert ended_at - began < LONGEST_S, text[-3000:]


def train_whole(rank: int, world: int, steps: int) -> list[float]:
    module = ValidatedModule(optimizer="Adam")
    fit_with(remote_or_ddp(2), module, make_loader(rank, steps), make_loader(9, 2))
    return module.losses


@pytest.mark.soak
@pytest.mark.process
def test_sigterm_stops_all_workers_after_the_same_step(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(train_whole, 100, world=3)
    with running(tmp_path, 3, 100) as programs:
        programs[0].wait_for("five steps done")
        programs[1].signal(signal.SIGTERM)
        finish(programs)
    (path,) = tmp_path.glob("**/interrupted.ckpt")
    steps = torch.load(path, weights_only=True)["global_step"]
    assert 5 <= steps < 100
    with running(tmp_path, 3, 100, ckpt_path=str(path)) as programs:
        _, rest = finish(programs)
    for rank in (0, 1):
        losses = json.loads(rest[rank].rpartition("losses ")[2].strip())
        assert losses == whole[rank][steps:]
