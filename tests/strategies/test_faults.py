"""Real processes: a crash, a killed worker, SIGTERM and Ctrl-C end all workers as documented."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco import GASLoCStrategy
from tests.harness.pool import Pool, make_trainer
from tests.harness.programs import Program, python_script
from tests.harness.small_model import TinyModule, make_loader

pytestmark = pytest.mark.process

SCRIPT = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit it ignored
import torch
from lightning.pytorch.callbacks import Callback
from lightning_loco import GASLoCStrategy
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.harness.small_model import TinyModule, WorkerData, quiet_trainer

class Event(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 5:
            print("five batches done", flush=True)
        time.sleep(0.01)
        {event}

def main():
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    module = TinyModule(optimizer="Adam")
    trainer = quiet_trainer(
        strategy=GASLoCStrategy("ring", sync_every={sync_every}, timeout_s=60),
        devices=3, max_steps={max_steps}, callbacks=[Event()],
        use_distributed_sampler=False, default_root_dir={folder!r},
    )
    loader = StatefulDataLoader(WorkerData(rank, {max_steps}), batch_size=None)
    trainer.fit(module, loader, ckpt_path={ckpt_path!r})
    print(f"worker {{rank}} losses {{module.losses}}", flush=True)
    print(f"worker {{rank}} finished at {{trainer.global_step}}", flush=True)

if __name__ == "__main__":
    main()
"""


def script(
    folder: Path,
    event: str = "pass",
    sync_every: int = 1000,
    max_steps: int = 3000,
    ckpt_path: str | None = None,
) -> str:
    """Return the command that runs the script with these settings."""
    return SCRIPT.format(
        event=event,
        sync_every=sync_every,
        max_steps=max_steps,
        folder=str(folder),
        ckpt_path=ckpt_path,
    )


def running(folder: Path, *event: str, **settings: Any) -> Program:
    """Start the script; Lightning starts two more workers."""
    return Program(python_script(folder, script(folder, *event, **settings)), folder)


@pytest.mark.soak
@pytest.mark.parametrize("worker", [0, 1])
def test_crash_on_one_worker_ends_all_with_its_traceback(tmp_path: Path, worker: int) -> None:
    event = f"assert (trainer.global_rank, batch_idx) != ({worker}, 7), 'the sky fell'"
    with running(tmp_path, event) as program:
        program.wait_for("five batches done")
        started = time.monotonic()
        code, output = program.finish(30)
        assert time.monotonic() - started < 30
        assert code != 0
    assert "AssertionError: the sky fell" in output
    if worker == 0:  # the launcher kills children of a dead child, but not of a dead main process
        assert "WorkerFailure: Worker 0 failed:" in output


KILLED = "if (trainer.global_rank, batch_idx) == (2, 7): os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.soak
def test_after_a_kill_the_launcher_ends_all(tmp_path: Path) -> None:
    """Lightning's launcher checks its processes every 5 s, and kills all if one has died."""
    with running(tmp_path, KILLED) as program:
        program.wait_for("five batches done")
        code, output = program.finish(30)
    assert code == -signal.SIGKILL
    assert "terminated with code -9" in output
    assert "No message" not in output


@pytest.mark.soak
def test_sigterm_stops_all_at_one_step_with_a_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, max_steps=3000) as program:
        program.wait_for("five batches done")
        program.signal(signal.SIGTERM)
        _, output = program.finish(30)
    path = tmp_path / "interrupted.ckpt"
    assert f"saved {path}" in output
    step = torch.load(path)["global_step"]
    assert 5 < step < 3000
    files = sorted(Path(f"{path}.loco").glob("*/worker_*.pt"))
    assert len(files) == 3
    assert {torch.load(file)["engine"]["steps"] for file in files} == {step}


SYNC_EVERY = 150


@pytest.mark.soak
def test_interrupted_run_equals_uninterrupted_run(pool: Pool, tmp_path: Path) -> None:
    """After a stop between two rounds, the losses equal those of an uninterrupted run.

    Workers agree on the stop within some tens of steps, long before the next round.
    """
    event = "if (trainer.global_rank, batch_idx) == (1, 163): os.kill(os.getpid(), signal.SIGTERM)"
    with running(tmp_path, event, sync_every=SYNC_EVERY, max_steps=400) as program:
        _, first = program.finish(120)
    path = tmp_path / "interrupted.ckpt"
    step = torch.load(path)["global_step"]
    assert step % SYNC_EVERY != 0
    assert "finished" not in first
    with running(tmp_path, sync_every=SYNC_EVERY, max_steps=400, ckpt_path=str(path)) as program:
        again = losses(program.finish(120)[1])
    for worker, whole in enumerate(pool.run(fit_whole, world=3)):
        assert again[worker] == whole[step:]


def fit_whole(rank: int, world: int) -> list[float]:
    module = TinyModule(optimizer="Adam")
    strategy = GASLoCStrategy("ring", sync_every=SYNC_EVERY)
    trainer = make_trainer(strategy, max_steps=400, use_distributed_sampler=False)
    trainer.fit(module, make_loader(rank, 400))
    return module.losses


@pytest.mark.soak
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        program.wait_for("five batches done")
        program.signal_all(signal.SIGINT)
        code, _ = program.finish(30)
        assert code != 0


def losses(output: str) -> dict[int, list[float]]:
    """Return the losses printed by each worker."""
    return {
        int(worker): [float(value) for value in values.split(",")]
        for worker, values in re.findall(r"worker (\d) losses \[([^\]]*)\]", output)
    }
