"""Checkpoints in orders of events that seeds decide, and those that have shown defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exploration.mutants import Mutant
from tests.exploration.mutants_saves import MUTANTS
from tests.exploration.run import Schedule, explore, replay

pytestmark = pytest.mark.recovery
SEEDS = 12
FOUND_WITHIN = 40
QUICK = (
    "a file is renamed before its content is on the disk",
    "the saves before are deleted before the main file is replaced",
    "only worker 0 writes the shared state, also on private disks",
    "what a killed writer has left is not deleted",
)
FINDINGS = {
    "saves_committed_while_deleted": "a save that another run deletes replaces the main file",
    "saves_folder_replaced_by_two": "two writers that replace a folder first use one subfolder",
}
"""Schedules with which defects were found, and the mutant that puts each defect back."""


def mutant(name: str) -> Mutant:
    return next(one for one in MUTANTS if one.name == name)


def test_all_properties_hold() -> None:
    for seed in range(SEEDS):
        outcome = explore("saves", seed)
        assert not outcome.kind, f"seed {seed}: {outcome.kind}: {outcome.failure}"


@pytest.mark.parametrize("name", QUICK)
def test_a_defect_is_found(name: str) -> None:
    with mutant(name).put_back():
        assert any(explore("saves", seed).kind for seed in range(FOUND_WITHIN))


@pytest.mark.parametrize("name", FINDINGS)
def test_a_defect_that_was_found_does_not_return(name: str) -> None:
    schedule = Schedule.load(Path(__file__).parent / "findings" / f"{name}.json")
    outcome = replay(schedule)
    assert not outcome.kind, outcome.failure
    with mutant(FINDINGS[name]).put_back():
        assert replay(schedule).kind
