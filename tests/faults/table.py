"""The table of faults: methods, victims, kinds of failures, phases, and how the others react.

New methods are added automatically. Other faults are tested elsewhere: losses before training in
tests/distributed/test_all_ranks.py, patience in tests/parameter_server/test_patience.py,
other points of a round and workers that return in tests/elastic/test_faults.py, peers in
tests/gossip/test_faults.py, and launchers in tests/strategies/test_faults.py.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import pytest

from lightning_loco import (
    DecoupledDiLoCoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
)
from lightning_loco.strategies import METHODS
from tests.cases import CASES
from tests.harness.cover import cover
from tests.harness.failing import KINDS

REMOTE = {"remote_optimizer in 2 tiers": 3, "remote_optimizer in 3 tiers": 4}
WORLDS = {
    **dict.fromkeys((name for name in METHODS if name != "remote_optimizer"), 3),
    **REMOTE,
    "elastic": 3,
}
"""The methods, and their numbers of ranks or members."""
NUM_WORKERS = 2
"""Number of workers of a remote optimizer."""

POINTS = {
    "local step": "local step",
    "packing": "packing",
    "exchange": "after sending",
    "outer step": "outer step",
    "checkpoint": "writing a checkpoint",
}
"""Phases of a worker, and the fault point in each."""
POINTS_OF_SERVERS = {"exchange": "summing", "outer step": "server step"}
HOOKS = ("validation", "set-up", "start", "epoch end", "stop")
"""Phases of a worker in which a callback fails; in the last one all others must stop."""
IN_SOAK = {"hangs", *HOOKS[1:]}


class Fault(NamedTuple):
    """One row of the table.

    Attributes:
        kind: Kind of the failure, a key of ``KINDS``.
        phase: A key of :data:`POINTS`, or one of :data:`HOOKS`.
        method: A key of :data:`WORLDS`.
        victim: The rank or member that fails; 0 hosts the key-value store.
    """

    kind: str
    phase: str
    method: str
    victim: int

    @property
    def point(self) -> str | None:
        """The fault point at which the victim fails; None in a callback."""
        if self.method == "elastic" and self.phase == "exchange":
            return "within the exchange" if self.kind == "killed" else "exchange"
        return (POINTS_OF_SERVERS if self.is_of_server else POINTS).get(self.phase)

    @property
    def is_of_server(self) -> bool:
        """Whether the victim is a server."""
        return self.method in REMOTE and self.victim >= NUM_WORKERS

    @property
    def is_possible(self) -> bool:
        """Whether the victim exists, and reaches the phase."""
        if self.phase == "stop" and self.method != "diloco":
            return False
        if self.method == "elastic":
            reaches = self.phase in POINTS and self.phase != "checkpoint"
            return reaches and self.victim < 2 and self.kind not in ("frozen", "hangs")
        if self.method not in REMOTE:
            return self.victim < 2
        if self.is_of_server:
            return self.victim < WORLDS[self.method] and self.phase in POINTS_OF_SERVERS
        return self.phase != "checkpoint" or self.victim == 0  # the workers write these

    @property
    def named(self) -> re.Pattern[str]:
        """The pattern of the others' errors, which name the victim."""
        who = rf"worker {self.victim}(?!\d)"
        if self.is_of_server:
            who = rf"the (aggregator|optimizer|aggregator-optimizer) \(rank {self.victim}\)"
        lost = rf"{who} \(no sign of life"
        ended, silent = "worker 0, which hosts it, has ended", "worker 0 is unreachable"
        patterns = {
            "killed": lost if self.victim else ended,
            "frozen": lost if self.victim else silent,
            "raises": rf"{who}.*trouble",
            "leaves": rf"{who}.*SystemExit",
            "hangs": rf"{who} \(alive, last exchange: ",
        }
        if self.method in REMOTE:
            late = r"[^\n]* It has ended, or is later than|no (step|sync point) \d+ s after another"
            patterns["hangs"] = f"{who}: ({late})"
            patterns["killed"] += f"|{lost}|{patterns['hangs']}"
            patterns["frozen"] += f"|{lost}|{patterns['hangs']}"
        return re.compile(patterns[self.kind], re.IGNORECASE | re.DOTALL)

    def strategy(self, timeout_s: float) -> Any:
        """Make the strategy, with rounds every few steps, or as often as possible."""
        if self.method in REMOTE:
            return RemoteOptimizerStrategy(NUM_WORKERS, timeout_s=timeout_s)
        if self.method == "pairwise_gossip":
            return PairwiseGossipStrategy(1.0, timeout_s=timeout_s)
        if self.method == "decoupled_diloco":
            return DecoupledDiLoCoStrategy(5, 3, timeout_s=timeout_s)
        every = 10_000 if self.phase == "stop" else 5
        return CASES[self.method].strategy(every, timeout_s=timeout_s)


def rows() -> list[Any]:
    """Return each kind in each phase, and each method and victim at least once."""
    every_day: list[Any] = []
    in_soak: list[Any] = []
    for kind, phase in itertools.product(KINDS, (*POINTS, *HOOKS)):
        is_for_soak = not IN_SOAK.isdisjoint((kind, phase))
        marks = [pytest.mark.soak] * is_for_soak
        pair = pytest.param(kind, phase, id=f"{kind}-{phase}", marks=marks)
        (in_soak if is_for_soak else every_day).append(pair)
    others = WORLDS, range(max(WORLDS.values()))
    return [
        row
        for pairs in (every_day, in_soak)
        for row in cover(pairs, *others, strength=1, possible=lambda *row: Fault(*row).is_possible)
    ]
