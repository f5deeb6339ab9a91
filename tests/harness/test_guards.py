"""Guards detect leftovers of a test, and restore what can be restored."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from tests.harness.guards import Surroundings
from tests.harness.programs import Program


def test_nothing_left(tmp_path: Path) -> None:
    before = Surroundings.now(tmp_path)
    (tmp_path / ".pytest_cache").mkdir()
    assert before.restore() == []


def test_threads(tmp_path: Path) -> None:
    before = Surroundings.now(tmp_path)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    assert before.restore(patience_s=0.1) == ["thread 'forgotten' (daemon=True)"]
    threading.Timer(0.1, end.set).start()
    assert before.restore() == [], "a thread that is about to end has time to do so"


def test_processes(tmp_path: Path) -> None:
    before = Surroundings.now(tmp_path)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs; before that it has no command line
        (left,) = before.restore(patience_s=0.5)
        assert left.startswith(f"process {process.pid}: ")
        assert left.endswith("-c print(flush=True); input()")
        process.kill()
    assert before.restore() == []


def test_files(tmp_path: Path) -> None:
    before = Surroundings.now(tmp_path)
    (tmp_path / "lightning_logs").mkdir()
    assert before.restore() == ["file lightning_logs"]


def test_process_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    before = Surroundings.now(tmp_path)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    (left,) = [line for line in before.restore() if "group" in line]
    assert left == "the process group of torch.distributed (rank 0 of 1)"
    assert not dist.is_initialized()


def test_environment_and_rank_are_put_back(tmp_path: Path) -> None:
    os.environ["KEPT"] = "before"
    before = Surroundings.now(tmp_path)
    os.environ["KEPT"] = "after"
    os.environ["NEW"] = "1"
    rank_zero_only.rank = 3
    assert before.restore() == []
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ
    assert rank_zero_only.rank == 0


def test_a_test_that_starts_processes_must_be_marked() -> None:
    with pytest.raises(AssertionError, match="pytest.mark.process"):
        Program([sys.executable, "-c", ""])


def test_settings_of_matplotlib(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = Surroundings.now(tmp_path)
    kept = matplotlib.rcParams["svg.fonttype"]
    matplotlib.rcParams["svg.fonttype"] = "none"
    assert before.restore() == ["matplotlib.rcParams['svg.fonttype'] = 'none'"]
    assert matplotlib.rcParams["svg.fonttype"] == kept
