"""Real processes: every way in which Lightning starts or detects its workers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_loco import DiLoCoStrategy, GASLoC, RemoteOptimizerStrategy
from tests.harness.programs import Program, free_ports
from tests.harness.small_model import quiet_trainer
from tests.harness.toys import simulate
from tests.strategies import launched

pytestmark = pytest.mark.process

SCRIPT = str(Path(launched.__file__))


def script(folder: Path, start_method: str = "popen", *changes: str) -> list[str]:
    return [SCRIPT, str(folder), start_method, *changes]


def expected_weights() -> Tensor:
    """Compute two workers on a ring in one process; no round follows the last step."""
    rounds = launched.STEPS // launched.SETTINGS["sync_every"]
    return simulate(GASLoC(), 2, rounds, last_round=False, **launched.SETTINGS)[-1, 0]


def assert_trained(folder: Path, environment: str, launcher: str, num_nodes: int = 1) -> None:
    """Check the weights; with several nodes, each node is a worker."""
    size, num_ranks = (1 if num_nodes == 1 else 2), 2 * num_nodes
    results: list[dict[str, Any]] = [
        torch.load(folder / f"worker{rank}.pt") for rank in range(num_ranks)
    ]
    assert len({result["process"] for result in results}) == num_ranks
    for rank, result in enumerate(results):
        assert torch.equal(result["weights"], results[0]["weights"])
        torch.testing.assert_close(result["weights"], expected_weights(), rtol=0, atol=1e-12)
        assert (result["world"], result["rounds"]) == (num_ranks, 1)
        assert result["worker"] == divmod(rank, size)
        assert (result["environment"], result["launcher"]) == (environment, launcher)
    assert torch.equal(torch.load(folder / "returned.pt"), results[0]["weights"])


@pytest.mark.soak
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
    Program([sys.executable, *script(tmp_path, start_method)]).succeed()
    assert_trained(tmp_path, "LightningEnvironment", launcher)


@pytest.mark.soak
def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    Program([*torchrun, "--nproc-per-node=2", *script(tmp_path)]).succeed()
    assert_trained(tmp_path, "TorchElasticEnvironment", "_SubprocessScriptLauncher")


def slurm_variables(rank: int, port: int, num_nodes: int) -> dict[str, str]:
    """Return variables of a task of ``srun --ntasks-per-node=2``; all nodes are this machine."""
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(2 * num_nodes),
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "MASTER_PORT": str(port),
    }


@pytest.mark.soak
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_slurm(tmp_path: Path, num_nodes: int) -> None:
    (port,) = free_ports()
    changes = [] if num_nodes == 1 else ["num_nodes=2", "replica_size='node'"]
    command = [sys.executable, *script(tmp_path, "popen", *changes)]
    tasks = [slurm_variables(rank, port, num_nodes) for rank in range(2 * num_nodes)]
    for program in [Program(command, **variables) for variables in tasks]:
        program.succeed()
    assert_trained(tmp_path, "SLURMEnvironment", "_SubprocessScriptLauncher", num_nodes)


@pytest.mark.soak
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_a_mistake_ends_the_program(tmp_path: Path, start_method: str) -> None:
    started_s = time.monotonic()
    arguments = script(tmp_path, start_method, "topology='moebius'")
    with Program([sys.executable, *arguments]) as program:
        code, output = program.finish()
    assert code != 0
    assert "moebius" in output
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started_s < launched.TIMEOUT_S  # no worker waits for it


@pytest.mark.parametrize("strategy", [DiLoCoStrategy, RemoteOptimizerStrategy])
def test_mpirun_without_mpi4py_is_refused(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Strategy]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    with pytest.raises(ValueError, match="MPI has started 5 processes .OMPI_COMM_WORLD_SIZE=5."):
        quiet_trainer(strategy=strategy(), devices=5)
    monkeypatch.setenv("LOCAL_RANK", "0")  # the rank comes from the script, or from Lightning
    assert quiet_trainer(strategy=strategy(), devices=5).world_size in (4, 5)
