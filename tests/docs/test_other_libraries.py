"""The diffs for users of other libraries: both programs run, and end with the same parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness.pages import doc
from tests.harness.programs import Program, free_ports

OF_TORCHFT, OF_ACCELERATE, OF_HIVEMIND = doc("guides/from_other_libraries.md").blocks("diff")
STEPS = 80
# Each program imports this; it ends with a file of the parameters.
MINE = f"""
import atexit, os, torch

worker = int(os.environ.get("WORKER", os.environ.get("RANK")))
torch.manual_seed(0)
layers = torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
model = torch.nn.Sequential(*layers).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn({STEPS}, 2, 4, 3, dtype=torch.float64)  # steps, workers, samples
batches = inputs[:, worker]
loader = torch.utils.data.DataLoader(inputs.view(-1, 3), batch_size=4)


def loss_of(model, batch):
    return (model(batch).squeeze(1) - batch.sum(1)).square().mean()


def local_step(batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@atexit.register
def save(model=model):
    torch.save([p.detach() for p in model.parameters()], f"{{worker}}.pt")
"""


def programs(diff: str, folder: Path) -> list[Path]:
    """Write the script before and after the diff, each to a folder of its own with mine.py."""
    scripts = []
    for name, other in (("before", "+"), ("after", "-")):
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(other)]
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(MINE)
        scripts.append(folder / name / "train.py")
        scripts[-1].write_text("\n".join(lines))
    return scripts


def ends(script: Path) -> list[Tensor]:
    """Return the parameters of both workers at the end."""
    found = [torch.load(script.with_name(f"{worker}.pt")) for worker in range(2)]
    return [torch.cat([p.flatten() for p in one]) for one in found]


def torchrun(script: Path, processes: int) -> list[str]:
    (port,) = free_ports()
    options = [f"--nproc-per-node={processes}", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


def run_members(script: Path, lighthouse: str, is_ours: bool) -> list[Tensor]:
    """Start two workers one by one, and return their parameters."""
    running = []
    for worker in range(2):
        command = [sys.executable, str(script)] if is_ours else torchrun(script, 1)
        environ = {"WORKER": str(worker), "TORCHFT_LIGHTHOUSE": lighthouse}
        running.append(Program(command, script.parent, **environ))
    with running[0], running[1]:
        for program in running:
            code, output = program.finish()
            assert code == 0, output
    return ends(script)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    pytest.importorskip("torchft")
    from tests.elastic.cluster import Lighthouse

    running = Lighthouse(2)
    yield running.address
    running.stop()


@pytest.mark.soak
@pytest.mark.process
def test_torchft(tmp_path: Path, lighthouse: str) -> None:
    before, after = programs(OF_TORCHFT, tmp_path)
    theirs = run_members(before, f"http://{lighthouse}", is_ours=False)
    ours = run_members(after, lighthouse, is_ours=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate(tmp_path: Path) -> None:
    found = []
    for script in programs(OF_ACCELERATE, tmp_path):
        Program(torchrun(script, 2), script.parent).succeed()
        found.append(ends(script))
    theirs, ours = found
    assert torch.equal(ours[0], ours[1])
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.soak
@pytest.mark.process
def test_hivemind(tmp_path: Path, lighthouse: str) -> None:
    _, after = programs(OF_HIVEMIND.replace("sync_every=100", "sync_every=20"), tmp_path)
    first, second = run_members(after, lighthouse, is_ours=True)
    assert torch.equal(first, second)
