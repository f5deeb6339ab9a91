"""A machine that vanishes from the network without a word, as one without power does."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import pytest

from lightning_loco.background import begin
from lightning_loco.elastic.gathering import SILENT_S
from tests.conftest import ROOT
from tests.networks import address, wired_together
from tests.programs import Program

pytestmark = [pytest.mark.slow, pytest.mark.long]

PORT = 29510
WORKER = "import sys; from tests.elastic.worker import main; main(sys.argv[1:])"


def lines_of(folder: Path, rank: int) -> list[dict]:
    """What a worker has written."""
    path = folder / f"{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until_written(programs: list[Program], folder: Path, count: int) -> None:
    """Wait until each worker has written so many lines."""
    for rank, program in enumerate(programs):
        while len(lines_of(folder, rank)) < count:
            assert program.process.poll() is None
            time.sleep(0.1)


def test_the_others_go_on(tmp_path: Path) -> None:
    lighthouse = [sys.executable, str(ROOT / "command.py"), "lighthouse", f"--bind=0.0.0.0:{PORT}"]
    with wired_together(3, tmp_path) as network:
        network.slow_down("100mbit")  # so that an exchange is under way most of the time
        beacon = network.run(0, *lighthouse)
        beacon.wait_for("listening")
        begin(beacon.process.stdout.read)  # it would stop where nobody reads what it says
        programs = []
        for rank in range(3):
            arguments = [
                *(sys.executable, "-c", WORKER, f"--lighthouse={address(0)}:{PORT}"),
                *(f"--index={rank}", f"--log={tmp_path / str(rank)}.jsonl", "--numel=1000000"),
                *("--rounds=40", "--min-workers=2", f"--host={address(rank)}", "--timeout-s=300"),
            ]
            programs.append(network.run(rank, *arguments))
            if rank == 1:  # the two that stay begin together
                until_written(programs[:2], tmp_path, 1)
        until_written(programs, tmp_path, 5)
        network.drop(2, "to", "10.77.0.0/24")
        for program in programs[:2]:
            code, output = program.finish()
            assert code == 0, output
    made = [{line["round"]: line for line in lines_of(tmp_path, rank)} for rank in range(2)]
    assert made[0].keys() ^ made[1].keys() <= {0, 1}  # one came a moment later than the other
    for index in made[0].keys() & made[1].keys():
        assert made[0][index]["checksum"] == made[1][index]["checksum"]
    assert len(made[0][40]["members"]) == 2
    times = [made[0][index]["time"] for index in range(2, 41)]
    assert max(after - before for before, after in itertools.pairwise(times)) < SILENT_S + 30
