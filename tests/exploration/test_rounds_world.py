"""Rounds in many orders of events: nothing is found today, and defects that are put in are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exploration.mutants import Mutant
from tests.exploration.mutants_rounds import MUTANTS
from tests.exploration.rounds_world import reference_of
from tests.exploration.run import Outcome, Schedule, explore, replay

FINDINGS = sorted((Path(__file__).parent / "findings").glob("rounds_*.json"))
_FOUND_SOON = {
    "a healthy neighbour is blamed: the watchdog is not asked",
    "workers at a sync point are not called to a round",
    "a worker without steps counts in a mean",
    "the result of a late barrier is deleted before all have read it",
    "a compressed message is read again while it is on its way",
}


def is_quick(mutant: Mutant) -> bool:
    return mutant.name in _FOUND_SOON


def find(seeds: range) -> Outcome | None:
    """Return the first run that fails."""
    reference_of.cache_clear()
    try:
        outcomes = (explore("rounds", seed) for seed in seeds)
        return next((outcome for outcome in outcomes if outcome.kind), None)
    finally:
        reference_of.cache_clear()


def test_nothing_is_found() -> None:
    found = find(range(12))
    assert found is None, f"{found.schedule.found}\n{found.details}"


@pytest.mark.parametrize("mutant", [*filter(is_quick, MUTANTS)], ids=lambda m: m.name)
def test_a_defect_is_found(mutant: Mutant) -> None:
    with mutant.put_back():
        assert find(range(40)) is not None


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_what_was_found_once_holds_now(path: Path) -> None:
    outcome = replay(Schedule.load(path))
    assert not outcome.kind, f"{outcome.schedule.found}\n{outcome.details}"


def test_another_process_makes_the_same_choices() -> None:
    """Nothing depends on the hashes of texts, which differ between processes."""
    program = (
        "import json; from tests.exploration.run import explore\n"
        "print(json.dumps([explore('rounds', seed).schedule.choices for seed in (0, 3)]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    assert first == second
    assert all(first)
