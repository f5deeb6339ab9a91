"""A lighthouse and elastic workers on machines with networks of their own."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_loco.background import begin
from tests.conftest import ROOT
from tests.networks import Network, address
from tests.programs import Program

PORT = 29510
WORKER = "import sys; from tests.elastic.worker import main; main(sys.argv[1:])"


def start_lighthouse(network: Network) -> None:
    """On the first machine; it listens."""
    command = [sys.executable, str(ROOT / "command.py"), "lighthouse", f"--bind=0.0.0.0:{PORT}"]
    lighthouse = network.run(0, *command)
    lighthouse.wait_for("listening")
    assert lighthouse.process.stdout is not None
    begin(lighthouse.process.stdout.read)  # it would stop where nobody reads what it says


def start_worker(network: Network, rank: int, folder: Path, *settings: str) -> Program:
    """On a machine; it writes its lines into the folder."""
    arguments = [f"--lighthouse={address(0)}:{PORT}", f"--host={address(rank)}"]
    arguments += [f"--index={rank}", f"--log={folder / str(rank)}.jsonl", *settings]
    return network.run(rank, sys.executable, "-c", WORKER, *arguments)
