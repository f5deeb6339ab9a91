"""A machine disappears from the network, as in a power failure."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lightning_loco.elastic.group import UNRESPONSIVE_S
from tests.elastic.cluster import lines_of, until
from tests.elastic.machines import start_lighthouse, start_worker
from tests.harness.networks import wired_together
from tests.harness.programs import Program

pytestmark = [pytest.mark.process, pytest.mark.soak]

ROUNDS = 40
"""Counted from the first round of three members, however long the third worker takes to start."""
SETTINGS = [
    *("--numel=1000000", f"--rounds={ROUNDS}", "--from-members=3"),
    *("--min-workers=2", "--timeout-s=300"),
]


def until_written(programs: list[Program], folder: Path, count: int) -> None:
    """Wait until each worker has written a number of lines."""
    for rank, program in enumerate(programs):

        def is_written(rank: int = rank, program: Program = program) -> bool:
            assert program.process.poll() is None
            return len(lines_of(folder, rank)) >= count

        until(is_written, f"line {count} of worker {rank}")


def test_the_others_continue(tmp_path: Path) -> None:
    with wired_together(3, tmp_path) as network:
        network.slow_down("100mbit")  # so that exchanges take most of the time
        start_lighthouse(network)
        programs = [start_worker(network, rank, tmp_path, *SETTINGS) for rank in range(2)]
        until_written(programs, tmp_path, 1)  # the two that remain start together
        programs.append(start_worker(network, 2, tmp_path, *SETTINGS))
        until_written(programs, tmp_path, 5)
        network.drop(2, "to", "10.77.0.0/24")
        for program in programs[:2]:
            code, output = program.finish()
            assert code == 0, output
    by_round = [{line["round"]: line for line in lines_of(tmp_path, rank)} for rank in range(2)]
    # One of them joined a moment later than the other.
    assert by_round[0].keys() ^ by_round[1].keys() <= {0, 1}
    for index in by_round[0].keys() & by_round[1].keys():
        assert by_round[0][index]["checksum"] == by_round[1][index]["checksum"]
    first = min(index for index, line in by_round[0].items() if len(line["members"]) == 3)
    last = max(by_round[0])
    assert last == max(by_round[1]) == first + ROUNDS
    assert len(by_round[0][last]["members"]) == 2
    times = [by_round[0][index]["time"] for index in range(2, last + 1)]
    assert max(after - before for before, after in itertools.pairwise(times)) < UNRESPONSIVE_S + 30
