"""All worlds in a few orders of events: nothing is found, and defects that are put back are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exploration.mutants import all_mutants
from tests.exploration.run import Schedule, explore, replay
from tests.exploration.worlds import WORLDS

SEEDS = range(8)
FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.json"))
QUICK = {
    "gossip": {
        "a snapshot stays reserved after it was sent": 1,
        "a snapshot that is being sent is overwritten": 3,
        "a peer may be silent beyond the deadline": 1,
    },
    "members": {
        "a result is applied before all have confirmed": 7,
        "a joining worker has weight": 2,
    },
    "rounds": {
        "a healthy neighbour is blamed: the watchdog is not asked": 11,
        "a worker without steps counts in a mean": 8,
        "the result of a late barrier is deleted before all have read it": 4,
        "a compressed message is read again while it is on its way": 16,
    },
    "saves": {
        "the folder is not synced after a file was written": 3,
        "the saves before are deleted before the main file is replaced": 0,
        "a file is renamed before its content is on the disk": 2,
        "two writers that replace a folder first use one subfolder": 8,
    },
}
"""Seeds that show a defect; `python -m tests.exploration --mutants` looks for all of them."""


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_found(world: str) -> None:
    for seed in SEEDS:
        outcome = explore(world, seed)
        assert not outcome.kind, f"seed {seed}: {outcome.schedule.found}\n{outcome.details}"


@pytest.mark.parametrize(
    ("world", "name"), [(w, name) for w, found in QUICK.items() for name in found]
)
def test_a_defect_is_found(world: str, name: str) -> None:
    seed = QUICK[world][name]
    mutant = next(mutant for mutant in all_mutants()[world] if mutant.name == name)
    with mutant.put_back():
        assert explore(world, seed).kind
    assert not explore(world, seed).kind


def test_each_world_has_defects_that_are_found() -> None:
    assert list(WORLDS) == sorted(QUICK)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_what_was_found_once_holds_now(path: Path) -> None:
    outcome = replay(Schedule.load(path))
    assert not outcome.kind, f"{outcome.schedule.found}\n{outcome.details}"


def test_a_seed_decides_everything() -> None:
    """Nothing depends on the hashes of texts, which differ between processes."""
    program = (
        "import json; from tests.exploration.run import explore\n"
        "from tests.exploration.worlds import WORLDS\n"
        "print(json.dumps([explore(world, 3).schedule.choices for world in WORLDS]))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(run.communicate()[0].splitlines()[-1]) for run in runs)
    assert first == second
    assert all(first)
