"""Elastic members in orders of events that are drawn: a few seeds, defects, and what was found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exploration.mutants import Mutant
from tests.exploration.mutants_members import MUTANTS
from tests.exploration.run import Schedule, explore, replay

SEEDS = range(12)
FINDINGS = sorted((Path(__file__).parent / "findings").glob("members_*.json"))

FOUND_BY = {
    "a member does not say what it has received": range(10009, 10010),
    "a joining worker has weight": range(10001, 10002),
    "members that have finished do not count": range(10000, 10001),
    "new members continue where the first one is in the data": range(10010, 10011),
}
"""Seeds that show a defect: others are in ``mutants_members.py``, and take longer."""


def test_all_properties_hold() -> None:
    for seed in SEEDS:
        outcome = explore("members", seed)
        assert not outcome.kind, f"seed {seed}: {outcome.failure}\n{outcome.details}"


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in FOUND_BY], ids=lambda m: m.name)
def test_a_defect_is_found(mutant: Mutant) -> None:
    seeds = FOUND_BY[mutant.name]
    assert not any(explore("members", seed).kind for seed in seeds)
    with mutant.put_back():
        assert any(explore("members", seed).kind for seed in seeds)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_what_was_found_holds_now(path: Path) -> None:
    outcome = replay(Schedule.load(path))
    assert not outcome.kind, outcome.details


_PRINT = """
import hashlib, json
from tests.exploration.run import explore
print(hashlib.sha256(json.dumps(explore("members", 3).schedule.choices).encode()).hexdigest())
"""


def test_a_seed_decides_everything() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT], env=environment, capture_output=True, text=True
        )
        digests.add(done.stdout.strip().splitlines()[-1])
    assert len(digests) == 1
