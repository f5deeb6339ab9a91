"""Rounds by counting local steps, whose number changes during a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lightning_loco.schedules.base import Now, Schedule
from lightning_loco.schedules.every_steps import EverySteps

SyncEvery = int | Sequence[int] | Mapping[int, int]
"""Local steps between rounds: of all, of each worker, or as they change during a run."""


@dataclasses.dataclass(frozen=True)
class VaryingSteps(Schedule):
    """A round after so many local steps, and after more or fewer later in the run.

    How many local steps a round has depends on its number alone, so that all workers agree, also
    those that come later or have less data, and a resumed run goes on as it would have.

    Args:
        sync_every: From the local step at which a number begins to hold to the number of local
            steps between rounds, at least 1. One begins at 0; a round that is under way when
            another number begins to hold ends as it began.
        overlap: A round ends when the next one begins, instead of at once.
        warm_start: With overlap, the first round ends at once.

    Raises:
        TypeError: If ``sync_every`` does not map integers to integers.
        ValueError: If none begins at 0, or one is smaller than 1.

    Example:
        >>> schedule = VaryingSteps({0: 2, 5: 10})
        >>> [schedule.steps_of_round(0, index) for index in range(5)]  # at steps 2, 4, 6, 16, 26
        [2, 2, 2, 10, 10]
    """

    sync_every: Mapping[int, int]
    overlap: bool = False
    warm_start: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not isinstance(self.sync_every, Mapping):
            raise TypeError(
                f"sync_every must be a mapping such as {{0: 10, 1000: 50}}, got {self.sync_every!r}"
            )
        for number in (*self.sync_every, *self.sync_every.values()):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(
                    "sync_every maps local steps to numbers of local steps, both integers, got "
                    f"{dict(self.sync_every)}."
                )
        if min(self.sync_every, default=-1) != 0 or min(self.sync_every.values()) < 1:
            raise ValueError(
                "sync_every must begin at step 0 and have at least 1 local step between rounds, "
                f"got {dict(self.sync_every)}. {{0: 10, 1000: 50}} is 10 up to step 1000, then 50."
            )
        object.__setattr__(self, "sync_every", dict(sorted(self.sync_every.items())))

    def steps_of_round(self, worker: int, round_index: int) -> int:
        """Local steps from the begin of a round to that of the next, on every worker."""
        begin, steps = 0, 1
        for (_, steps), end in zip_longest(self.sync_every.items(), [*self.sync_every][1:]):
            if end is None:
                break
            rounds = -(-max(0, end - begin) // steps)
            if round_index < rounds:
                break
            round_index -= rounds
            begin += rounds * steps
        return steps

    def due(self, now: Now) -> tuple[bool, bool]:
        """Both at the same time: a pending round ends when the next one begins."""
        due = now.steps_since_round >= self.steps_of_round(0, now.round_index)
        return due, due and now.pending is not None

    def is_overlapped(self, round_index: int) -> bool:
        """With overlap, but for the first round of a warm start."""
        return self.overlap and not (self.warm_start and round_index < self.num_fragments)

    def shortest_run(self, worker: int) -> int:
        """With overlap two rounds, since the result of the first one comes with the second."""
        steps = self.steps_of_round(0, 0) + self.steps_of_round(0, 1)
        return steps if self.overlap else 0

    def sync_every_of(self, worker: int) -> int:
        """Local steps of the first round."""
        return self.sync_every[0]

    def places_in(self, round_index: int) -> int:
        """One more than its steps, so that a long round begins after a short one has ended."""
        return self.steps_of_round(0, round_index) + 1

    def describe(self) -> dict[str, Any]:
        """The settings as plain values."""
        values = {str(step): steps for step, steps in self.sync_every.items()}
        return {**super().describe(), "sync_every": values}

    def metrics(self, round_index: int) -> dict[str, float]:
        """How many local steps a round has at present."""
        return {"sync_every": float(self.steps_of_round(0, round_index))}

    def __str__(self) -> str:
        parts = [f"{steps} from step {begin} on" for begin, steps in self.sync_every.items()]
        return f"a round every so many local steps: {', '.join(parts)}"


def by_steps(sync_every: SyncEvery, overlap: bool, warm_start: bool) -> Schedule:
    """The schedule of what users give as ``sync_every``."""
    if isinstance(sync_every, Mapping):
        return VaryingSteps(sync_every, overlap, warm_start)
    return EverySteps(sync_every, overlap, warm_start)
