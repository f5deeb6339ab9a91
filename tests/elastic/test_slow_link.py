"""Members on a link of 10 Mbit/s, on which an exchange takes seconds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.elastic.cluster import lines_of
from tests.elastic.machines import start_lighthouse, start_worker
from tests.harness.networks import wired_together

pytestmark = [pytest.mark.process, pytest.mark.soak]

ROUNDS = 6
NUMEL = 1_000_000
"""Four megabytes: an exchange of three takes four seconds."""


def test_no_member_is_declared_dead(tmp_path: Path) -> None:
    settings = [f"--numel={NUMEL}", f"--rounds={ROUNDS}", "--min-workers=3", "--timeout-s=120"]
    with wired_together(3, tmp_path) as network:
        network.slow_down("10mbit")
        start_lighthouse(network)
        programs = [start_worker(network, rank, tmp_path, *settings) for rank in range(3)]
        for program in programs:
            code, output = program.finish()
            assert code == 0, output
            assert "repeated" not in output
    for rank in range(3):
        lines = lines_of(tmp_path, rank)
        assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
        assert {len(line["members"]) for line in lines[1:]} == {3}
        times = [line["time"] for line in lines]
        seconds = [after - before for before, after in itertools.pairwise(times)]
        assert min(seconds) > 2  # the link was really that slow
