"""A schedule of rounds after a number of local steps that changes during a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lightning_loco.schedules.base import Schedule, StepInfo
from lightning_loco.schedules.every_steps import EverySteps

SyncEvery = int | Sequence[int] | Mapping[int, int]
"""Local steps between rounds: one number, one per worker, or a mapping from the step at which a
number begins to hold."""


@dataclasses.dataclass(frozen=True)
class VaryingSteps(Schedule):
    """Starts a round after a number of local steps that changes during the run.

    The number of local steps of a round depends on its index only. So all workers agree on it,
    including those that join later or have less data, and a resumed run continues as if it had not
    been interrupted.

    Args:
        sync_every: A mapping from the local step at which a number begins to hold to the number of
            local steps between rounds, at least 1. It must contain step 0. A round that has begun
            when another number begins to hold keeps its old number.
        overlap: A round ends when the next one begins, instead of at once.
        warm_start: With overlap, the first round ends at once.

    Raises:
        TypeError: If ``sync_every`` does not map integers to integers.
        ValueError: If step 0 is missing, or a number is smaller than 1.

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
        """Return the local steps from the start of a round to the start of the next."""
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

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        """End a pending round when the next one begins."""
        due = info.steps_since_round >= self.steps_of_round(0, info.round_index)
        return due, due and info.pending is not None

    def is_overlapped(self, round_index: int) -> bool:
        """Return whether rounds overlap, except the first round of a warm start."""
        return self.overlap and not (self.warm_start and round_index < self.num_fragments)

    def shortest_run(self, worker: int) -> int:
        """Return two rounds with overlap: the first result is applied in the second round."""
        steps = self.steps_of_round(0, 0) + self.steps_of_round(0, 1)
        return steps if self.overlap else 0

    def sync_every_of(self, worker: int) -> int:
        """Return the local steps of the first round."""
        return self.sync_every[0]

    def positions_in_round(self, round_index: int) -> int:
        """Return one more than its steps, so that positions ascend when rounds become longer."""
        return self.steps_of_round(0, round_index) + 1

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        values = {str(step): steps for step, steps in self.sync_every.items()}
        return {**super().describe(), "sync_every": values}

    def metrics(self, round_index: int) -> dict[str, float]:
        """Return the local steps of the next round, as ``sync_every``."""
        return {"sync_every": float(self.steps_of_round(0, round_index))}

    def __str__(self) -> str:
        parts = [f"every {steps} from step {begin} on" for begin, steps in self.sync_every.items()]
        return f"rounds by local steps: {', '.join(parts)}"


def by_steps(sync_every: SyncEvery, overlap: bool, warm_start: bool) -> Schedule:
    """Return the schedule for a user's ``sync_every``: a number, a list or a mapping."""
    if isinstance(sync_every, Mapping):
        return VaryingSteps(sync_every, overlap, warm_start)
    return EverySteps(sync_every, overlap, warm_start)
