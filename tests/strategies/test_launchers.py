"""Real processes: every way in which Lightning starts or finds its workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import GASLoC, Simulation
from tests.conftest import ROOT
from tests.strategies import launched
from tests.tiny import loss_of, make_model, worker_batch

pytestmark = pytest.mark.slow

SCRIPT = str(Path(launched.__file__))
LIMIT_S = 120.0


class Program:
    """A program in a process group of its own, so that nothing of it is left running."""

    def __init__(self, command: list[str], environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for the exit code and the output; kill everything when the time is up."""
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output, _ = self.process.communicate()
            pytest.fail(f"did not end within {limit_s:g} s:\n{output}")
        return self.process.returncode, output


def script(folder: Path, start_method: str = "popen", *changes: str) -> list[str]:
    return [SCRIPT, str(folder), start_method, *changes]


def expected_weights() -> Tensor:
    """Two workers on a ring, in one process."""
    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=launched.LR) for model in models]
    simulation = Simulation(models, GASLoC(), **launched.SETTINGS)
    steps = [0, 0]

    def local_step(worker: int) -> None:
        optimizers[worker].zero_grad()
        loss_of(models[worker], worker_batch(worker, steps[worker])).backward()
        optimizers[worker].step()
        steps[worker] += 1

    simulation.run(local_step, launched.STEPS // launched.SETTINGS["sync_every"])
    return simulation.consensus()


def assert_trained(folder: Path, environment: str, launcher: str) -> None:
    results: list[dict[str, Any]] = [torch.load(folder / f"worker{rank}.pt") for rank in (0, 1)]
    assert results[0]["process"] != results[1]["process"]
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    for result in results:
        torch.testing.assert_close(result["weights"], expected_weights(), rtol=0, atol=1e-12)
        assert (result["world"], result["rounds"]) == (2, 2)
        assert (result["environment"], result["launcher"]) == (environment, launcher)
    assert torch.equal(torch.load(folder / "returned.pt"), results[0]["weights"])


@pytest.mark.parametrize(
    ("start_method", "launcher"),
    [
        ("popen", "_SubprocessScriptLauncher"),
        ("spawn", "_MultiProcessingLauncher"),
        ("fork", "_MultiProcessingLauncher"),
        ("forkserver", "_MultiProcessingLauncher"),
    ],
)
def test_start_methods(tmp_path: Path, start_method: str, launcher: str) -> None:
    code, output = Program([sys.executable, *script(tmp_path, start_method)]).finish()
    assert code == 0, output
    assert_trained(tmp_path, "LightningEnvironment", launcher)


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    code, output = Program([*torchrun, "--nproc-per-node=2", *script(tmp_path)]).finish()
    assert code == 0, output
    assert_trained(tmp_path, "TorchElasticEnvironment", "_SubprocessScriptLauncher")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    """What ``srun --ntasks-per-node=2`` tells a task on one machine."""
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }


def test_slurm(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, *script(tmp_path)]
    programs = [Program(command, slurm_variables(rank, port)) for rank in (0, 1)]
    for code, output in [program.finish() for program in programs]:
        assert code == 0, output
    assert_trained(tmp_path, "SLURMEnvironment", "_SubprocessScriptLauncher")


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_a_mistake_ends_the_program(tmp_path: Path, start_method: str) -> None:
    started_s = time.monotonic()
    arguments = script(tmp_path, start_method, "topology='moebius'")
    code, output = Program([sys.executable, *arguments]).finish()
    assert code != 0
    assert "moebius" in output
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started_s < 60
