"""A lighthouse and elastic workers on machines in network namespaces."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_loco._util.background import run_in_thread
from tests.harness.networks import Network, address
from tests.harness.programs import Program
from tests.harness.sources import ROOT

PORT = 29510
WORKER = "import sys; from tests.elastic.worker import main; main(sys.argv[1:])"


def start_lighthouse(network: Network) -> None:
    """Start a lighthouse on the first machine, and wait until it listens."""
    command = [sys.executable, str(ROOT / "command.py"), "lighthouse", f"--bind=0.0.0.0:{PORT}"]
    lighthouse = network.run(0, *command)
    lighthouse.wait_for("listening")
    assert lighthouse.process.stdout is not None
    run_in_thread(lighthouse.process.stdout.read)  # or it would block once the pipe is full


def start_worker(network: Network, rank: int, folder: Path, *settings: str) -> Program:
    """Start a worker on a machine; its log is in the folder."""
    arguments = [f"--lighthouse={address(0)}:{PORT}", f"--host={address(rank)}"]
    arguments += [f"--index={rank}", f"--log={folder / str(rank)}.jsonl", *settings]
    return network.run(rank, sys.executable, "-c", WORKER, *arguments)
