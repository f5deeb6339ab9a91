"""Trainer.fit with several workers on one GPU, with gloo and with NCCL."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightning_loco import PairwiseGossipStrategy, RemoteOptimizerStrategy
from tests.cases import CASES, without_variants
from tests.harness.cover import cover
from tests.harness.gpu import let_nccl_share_the_gpu
from tests.harness.pool import Pool
from tests.harness.programs import Program, one_per_rank, python_script
from tests.harness.small_model import ValidatedModule, flat, make_loader
from tests.harness.toys import assert_close
from tests.strategies.families import all_ranks, remote_trainer

pytestmark = pytest.mark.gpu

BACKENDS = ["gloo", "nccl"]
SYNC_EVERY = 4
EXACT = [name for name in without_variants() if not CASES[name].by_clock]
BY_CLOCK = [name for name in without_variants() if CASES[name].by_clock]

# ------------------------------------------------------------------------ the same numbers


class Run(NamedTuple):
    """Results of a worker's training."""

    model: Tensor
    val_loss: float
    devices: list[tuple[str, str]]


class RecordDevice(Callback):
    """Records the device and the backend of a worker, and saves its epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.devices: list[tuple[str, str]] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        group = getattr(getattr(trainer.strategy, "group", None), "data", None)
        backend = "" if group is None else dist.get_backend(group)
        self.devices.append((next(module.parameters()).device.type, backend))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def make_strategy(name: str, world: int, backend: str) -> Strategy:
    if name == "ddp":
        return DDPStrategy(process_group_backend=backend)
    if name == "remote":
        return RemoteOptimizerStrategy(world - 1, timeout_s=20, process_group_backend=backend)
    if name == "pairwise":
        return PairwiseGossipStrategy(1.0, timeout_s=20, process_group_backend=backend)
    return CASES[name].strategy(SYNC_EVERY, timeout_s=20, process_group_backend=backend)


def train(rank: int, world: int, name: str, backend: str, gpu: bool, folder: Path) -> Run:
    """Train two epochs with validations; on a GPU, resume the second one from a checkpoint."""
    let_nccl_share_the_gpu(rank)
    path = folder / "saved.ckpt"
    parts = [(1, None), (2, str(path))] if gpu else [(2, None)]
    with all_ranks(num_nodes=world if gpu else 1) as environment:
        for max_epochs, ckpt_path in parts:
            module, recorder = ValidatedModule(optimizer="AdamW"), RecordDevice(path)
            trainer = remote_trainer(
                environment,
                make_strategy(name, world, backend),
                max_epochs=max_epochs,
                use_distributed_sampler=False,
                callbacks=[recorder],
                **({"accelerator": "gpu", "devices": 1, "num_nodes": world} if gpu else {}),
            )
            trainer.fit(module, make_loader(rank, 10), make_loader(9, 2), ckpt_path=ckpt_path)
    return Run(flat(module).cpu(), trainer.callback_metrics["val_loss"].item(), recorder.devices)


@pytest.mark.parametrize("name", EXACT)
def test_workers_on_one_gpu_equal_those_on_the_cpu(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests, name: str
) -> None:
    expected = pool.run(train, name, "gloo", False, tmp_path / "cpu", world=2)
    for backend in BACKENDS:
        with subtests.test(backend):
            found = pool.run(train, name, backend, True, tmp_path / backend, world=2)
            for on_cpu, on_gpu in zip(expected, found, strict=True):
                assert_close(on_gpu.model, on_cpu.model)
                assert on_gpu.val_loss == pytest.approx(on_cpu.val_loss)
                assert (on_cpu.devices, on_gpu.devices) == ([("cpu", "gloo")], [("cuda", backend)])


@pytest.mark.parametrize("name", [*BY_CLOCK, "pairwise"])
def test_workers_on_one_gpu_agree_at_the_end(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests, name: str
) -> None:
    for backend in BACKENDS:
        with subtests.test(backend):
            found = pool.run(train, name, backend, True, tmp_path / backend, world=2)
            for run in found:
                assert torch.isfinite(run.model).all()
                assert torch.equal(run.model, found[0].model)
                assert run.devices[0][0] == "cuda"


def test_a_remote_optimizer_equals_ddp(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(train, "ddp", "gloo", False, tmp_path / "cpu", world=2)
    for backend in BACKENDS:
        found = pool.run(train, "remote", backend, True, tmp_path / backend, world=3)
        for on_gpu in found:
            assert_close(on_gpu.model, expected[0].model)
            assert on_gpu.val_loss == pytest.approx(expected[0].val_loss)


# ------------------------------------------------------------------------- faults on NCCL

TIMEOUT_S = 4.0
LATEST_S = TIMEOUT_S + 6.0
EXIT_S = 5.0
METHODS = ["diloco", "async_diloco", "gasloc", "gasloc_overlap", "streaming_diloco", "remote"]

FAULTY = f"""
import faulthandler, os, signal, sys, time
from pathlib import Path
from lightning.pytorch import Callback
from lightning_loco import RemoteOptimizerStrategy
from tests.cases import CASES
from tests.harness.one_gpu import let_nccl_share_the_gpu
from tests.harness.programs import start_together
from tests.harness.small_model import TinyModule, make_loader, quiet_trainer

name, how, steps = sys.argv[1:]
rank = int(os.environ["NODE_RANK"])
let_nccl_share_the_gpu(rank)
faulthandler.register(signal.SIGUSR1, all_threads=True)

class Fault(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx != {2 * SYNC_EVERY + 1}:
            return
        print("lost at", time.time(), flush=True)
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

if name == "remote":
    strategy = RemoteOptimizerStrategy(2, timeout_s={TIMEOUT_S})
else:
    strategy = CASES[name].strategy({SYNC_EVERY}, timeout_s={TIMEOUT_S})
start_together(Path(__file__).parent, rank, 3)
trainer = quiet_trainer(
    strategy=strategy, accelerator="gpu", devices=1, num_nodes=3, max_epochs=1,
    use_distributed_sampler=False, callbacks=[Fault()],
)
try:
    trainer.fit(TinyModule(), make_loader(rank, int(steps)))
finally:
    print("raised at", time.time(), flush=True)
print("finished at", trainer.global_step)
"""


def three_on_nccl(
    folder: Path, name: str, how: str, steps: int
) -> AbstractContextManager[list[Program]]:
    """Start three ranks on one GPU; rank 1 is killed or freezes in the tenth step."""
    command = [*python_script(folder, FAULTY), name, how, str(steps)]
    return one_per_rank(command, 3, folder, num_nodes=3)


def number_after(text: str, output: str) -> float:
    return float(output.rpartition(text)[2].split()[0])


@pytest.mark.process
@pytest.mark.parametrize(("name", "how"), cover(METHODS, ["killed", "frozen"], strength=1))
def test_a_lost_worker_on_nccl_is_named_in_time(tmp_path: Path, name: str, how: str) -> None:
    with three_on_nccl(tmp_path, name, how, steps=4000) as workers:
        lost_at = 0.0
        for rank in (0, 2):
            code, output = workers[rank].finish(90)
            ended_at = time.time()
            assert code == 1, output
            assert "worker 1" in output.rpartition("Traceback (most recent")[2].lower(), output
            lost_at = lost_at or number_after("lost at", output)
            assert number_after("raised at", output) - lost_at < LATEST_S, output
            assert ended_at - lost_at < LATEST_S + EXIT_S, output
