"""A remote optimizer loses ranks or is stopped, with one program per rank."""

from __future__ import annotations

import json
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.pool import Pool
from tests.harness.programs import LIMIT_S, Program, one_per_rank, python_script
from tests.harness.small_model import TinyModule, ValidatedModule, make_loader
from tests.strategies.families import fit_with, remote_or_ddp


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


def fit_lists(rank: int, world: int) -> None:
    fit_with(remote_or_ddp(2), Lists(), make_loader(rank, 4))


@pytest.mark.filterwarnings("ignore:Checkpoints after fit have no optimizer state")
def test_a_state_that_cannot_be_sent_works_without_checkpoints(pool: Pool) -> None:
    pool.run(fit_lists, world=4)


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
