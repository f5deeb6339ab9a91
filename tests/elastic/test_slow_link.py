"""Members at a link of 10 Mbit/s that an exchange keeps busy for seconds."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.networks import address, wired_together

pytestmark = [pytest.mark.slow, pytest.mark.long]

PORT = 29510
ROUNDS = 6
NUMEL = 1_000_000
"""Four megabytes: an exchange of three takes four seconds."""

WORKER = "import sys; from tests.elastic.worker import main; main(sys.argv[1:])"


def test_nobody_is_declared_dead(tmp_path: Path) -> None:
    lighthouse = [sys.executable, str(ROOT / "command.py"), "lighthouse", f"--bind=0.0.0.0:{PORT}"]
    with wired_together(3, tmp_path) as network:
        network.slow_down("10mbit")
        network.run(0, *lighthouse).wait_for("listening")
        programs = [
            network.run(
                rank,
                *(sys.executable, "-c", WORKER, f"--lighthouse={address(0)}:{PORT}"),
                *(f"--index={rank}", f"--log={tmp_path / str(rank)}.jsonl", f"--numel={NUMEL}"),
                *(f"--rounds={ROUNDS}", "--min-workers=3", f"--host={address(rank)}"),
                "--timeout-s=120",
            )
            for rank in range(3)
        ]
        for program in programs:
            code, output = program.finish()
            assert code == 0, output
            assert "repeated" not in output
    for rank in range(3):
        lines = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
        assert {len(line["members"]) for line in lines[1:]} == {3}
        times = [line["time"] for line in lines]
        seconds = [after - before for before, after in itertools.pairwise(times)]
        assert min(seconds) > 2  # the link was as slow as it should be
