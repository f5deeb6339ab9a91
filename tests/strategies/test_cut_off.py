"""A machine is disconnected during training: all workers exit in time with an error naming it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.networks import address, wired_together
from tests.harness.programs import Program, python_script

pytestmark = [pytest.mark.process, pytest.mark.soak]

WORLD = 3
TIMEOUT_S = 4.0
LONGEST_S = TIMEOUT_S + 6
SCRIPT = """
import os, time
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from lightning_loco import DiLoCoStrategy, GASLoCStrategy
from tests.harness.programs import start_together
from tests.harness.small_model import TinyModule, make_loader, quiet_trainer

class Slow(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 50:
            print("fifty batches done", flush=True)
        time.sleep(0.02)

torch.set_num_threads(1)
rank = int(os.environ["NODE_RANK"])
start_together(Path(__file__).parent, rank, {world})
trainer = quiet_trainer(
    strategy={strategy}(sync_every=5, timeout_s={timeout_s}), devices=1, num_nodes={world},
    max_epochs=1, callbacks=[Slow()], use_distributed_sampler=False,
)
try:
    trainer.fit(TinyModule(), make_loader(rank, 10_000))
finally:
    print("ended at", time.monotonic(), flush=True)
"""


def end_of(program: Program, cut_at: float) -> str:
    """Return how a program exited in time, not counting the time of Python's exit."""
    code, output = program.finish(60)
    assert code == 1, output
    ended_at = float(output.partition("ended at ")[2].split()[0])
    assert ended_at - cut_at < LONGEST_S, output
    return output


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("strategy", ["DiLoCoStrategy", "GASLoCStrategy"])
def test_an_unreachable_worker_is_named(strategy: str, lost: int, tmp_path: Path) -> None:
    text = SCRIPT.format(strategy=strategy, timeout_s=TIMEOUT_S, world=WORLD)
    command = python_script(tmp_path, text)
    job = {"MASTER_ADDR": address(0), "MASTER_PORT": "29520", "WORLD_SIZE": str(WORLD)}
    with wired_together(WORLD, tmp_path) as network:
        programs = [
            network.run(rank, *command, NODE_RANK=str(rank), LOCAL_RANK="0", **job)
            for rank in range(WORLD)
        ]
        for program in programs:
            program.wait_for("fifty batches done")
        network.cut(lost)
        cut_at = time.monotonic()
        ends = [end_of(program, cut_at) for program in programs]
    for rank, output in enumerate(ends):
        if lost == 0 and rank == 0:
            assert "worker 1 (no sign of life" in output, output
            assert "worker 2 (no sign of life" in output, output
        elif lost == 0 or rank == lost:
            assert "worker 0 is unreachable" in output, output
        else:
            assert "worker 1 (no sign of life" in output, output
            assert "worker 2 (no sign of life" not in output, output
