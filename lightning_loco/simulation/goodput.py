"""Which local steps of simulated learners have entered a merge, and the merges of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightning_loco._util.goodput import Counted
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import Merge, Push, Version
from lightning_loco.syncer.syncer import Syncer


class MergeSummary(NamedTuple):
    """The merges of a run.

    Attributes:
        merges: How many there were.
        sync_every: Local steps of a worker between two merges of a fragment: a mean.
        pushes: Pushes in a merge: a mean.
        age: Merges of a fragment since the version that a push is relative to: a mean.
    """

    merges: int
    sync_every: float
    pushes: float
    age: float

    @classmethod
    def of(cls, merges: Sequence[Merge], steps: Sequence[int], fragments: int) -> MergeSummary:
        """Summarize merges while workers made these local steps; ValueError without a merge."""
        if not merges:
            raise ValueError("There were no merges. Simulate a longer time.")
        ages = [age for merge in merges for age in merge.ages]
        every = sum(steps) / len(steps) * fragments / len(merges)
        return cls(len(merges), every, len(ages) / len(merges), sum(ages) / len(ages))


Base = tuple[str, int, int, Version]
"""Learner, generation, fragment, and the version that progress is relative to."""


class MergedSteps:
    """Counts the local steps whose progress has entered merges, as means over the fragments.

    Of the local steps between a push and its result ``mix`` keeps a share, which is not counted.

    Args:
        fragments: Number of fragments.
    """

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._merged: dict[str, int] = defaultdict(int)
        self._bases: set[Base] = set()

    def add(self, merge: Merge) -> None:
        """Note a merge."""
        for push in merge.pushes:
            self._merged[push.learner] += push.steps
            self._bases.add(_base_of(push))

    def of_learner(self, name: str, rounds: LearnerRounds | None, syncer: Syncer) -> Counted:
        """Return the local steps of a learner, all its processes together.

        Args:
            name: Of the learner.
            rounds: The counters of its process; None if it is dead.
            syncer: The syncer, whose waiting pushes may be merged.
        """
        pending: dict[Base, int] = defaultdict(int)
        for push in syncer.rounds.waiting_pushes():
            if push.learner == name:
                base = _base_of(push)
                pending[base] = max(pending[base], push.steps)
        for fragment, version in enumerate(rounds.received if rounds is not None else ()):
            if rounds is not None and version is not None:
                pending[name, rounds.generation, fragment, version] = rounds.steps[fragment]
        open_steps = sum(steps for base, steps in pending.items() if base not in self._bases)
        return Counted(self._merged[name] / self._fragments, open_steps / self._fragments)


def _base_of(push: Push) -> Base:
    return push.learner, push.generation, push.due.fragment, push.base
