"""Gossip in orders of events that seeds decide."""

from __future__ import annotations

import pytest

from tests.exploration.mutants_gossip import MUTANTS
from tests.exploration.run import explore

SEEDS = 12
FOUND_WITHIN = 40
QUICK = (
    "the tag is that of the reply before",
    "a peer loses points for the end of this node",
    "the clock is not averaged",
    "fetches on an emulated link are counted twice",
)


def test_all_properties_hold() -> None:
    for seed in range(SEEDS):
        outcome = explore("gossip", seed)
        assert not outcome.kind, f"seed {seed}: {outcome.kind}: {outcome.failure}"


@pytest.mark.parametrize("name", QUICK)
def test_a_defect_is_found(name: str) -> None:
    mutant = next(one for one in MUTANTS if one.name == name)
    with mutant.put_back():
        assert any(explore("gossip", seed).kind for seed in range(FOUND_WITHIN))
