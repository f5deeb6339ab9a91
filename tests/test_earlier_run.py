"""What a run drops that starts from the consensus of an earlier one, in words."""

from __future__ import annotations

from typing import Any

from lightning_loco.algorithms import DiLoCo, GASLoC
from lightning_loco.earlier_run import EarlierRun


def test_what_is_dropped_is_said() -> None:
    state: dict[str, Any] = {
        "fragments": [{"pending": None}, {"pending": {"index": 3}}],
        "shared": [{"state": {"outer": 1, "momentum": 2}}],
    }
    start, pending = "all workers start from the consensus", "a pending round is dropped"
    saved = EarlierRun(state, "DiLoCo", {}, has_same_workers=True)
    dropped = "the state of DiLoCo (momentum, outer) is dropped"
    assert saved.dropped_by(GASLoC()) == [start, dropped, pending]
    assert saved.dropped_by(DiLoCo()) == [start, pending]
    assert EarlierRun({}, "DiLoCo", {}, has_same_workers=True).dropped_by(GASLoC()) == [start]
