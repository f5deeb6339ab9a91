"""Schedules of rounds after a number of local steps, which is fixed or changes during a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lightning_loco.schedules.schedule import Schedule, StepInfo

SyncEvery = int | Sequence[int] | Mapping[int, int]
"""Local steps between rounds: one number, one per worker, or a mapping from the step at which a
number begins to hold."""

_ROUNDING = 1e-9


def by_steps(sync_every: SyncEvery, overlap: bool = False, warm_start: bool = True) -> Schedule:
    """Return the schedule for a user's ``sync_every``: a number, a list or a mapping."""
    if isinstance(sync_every, Mapping):
        return VaryingSteps(sync_every, overlap, warm_start)
    return EverySteps(sync_every, overlap, warm_start)


@dataclasses.dataclass(frozen=True)
class EverySteps(Schedule):
    """Starts a round after every ``sync_every`` local steps.

    Args:
        sync_every: Local steps between rounds, at least 1; or one number per worker.
        overlap: A round ends when the next one begins, instead of at once.
        warm_start: With overlap, the first round ends at once.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is smaller than 1.

    Example:
        >>> EverySteps(10).due(StepInfo(30, 10, 2, 0, 1.0, None))
        (True, False)
    """

    sync_every: int | Sequence[int] = 100
    overlap: bool = False
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_sync_every(self.sync_every)

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        """End a pending round when the next one begins."""
        due = info.steps_since_round >= self.sync_every  # type: ignore[operator]
        return due, due and info.pending is not None

    def is_overlapped(self, round_index: int) -> bool:
        """Return whether rounds overlap, except the first round of a warm start."""
        return self.overlap and not (self.warm_start and round_index < self.num_fragments)

    def shortest_run(self, worker: int) -> int:
        """Return two rounds with overlap: the first result is applied in the second round."""
        return 2 * self.sync_every_of(worker) if self.overlap else 0

    def sync_every_of(self, worker: int) -> int:
        """Return a worker's local steps between rounds."""
        return self.sync_every if isinstance(self.sync_every, int) else self.sync_every[worker]

    def of_worker(self, worker: int) -> EverySteps:
        """Return the schedule with the number of this worker instead of a list."""
        return dataclasses.replace(self, sync_every=self.sync_every_of(worker))

    def check(self, num_workers: int) -> None:
        """Raise ValueError if a list does not have one number per worker."""
        check_length(self.sync_every, num_workers)

    def __str__(self) -> str:
        steps = "local step" if self.sync_every == 1 else f"{self.sync_every} local steps"
        late = ", applied one round later" if self.overlap else ""
        return f"a round every {steps}{late}"


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


def check_sync_every(sync_every: object) -> None:
    """Raise TypeError or ValueError unless all numbers are integers of at least 1."""
    is_list = isinstance(sync_every, Sequence) and not isinstance(sync_every, str)
    for steps in sync_every if is_list else [sync_every]:  # type: ignore[attr-defined]
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(
                "sync_every counts optimizer steps between rounds and must be an integer (or a "
                f"list with one per worker), got {sync_every!r}."
            )
        if steps < 1:
            raise ValueError(
                "sync_every counts optimizer steps between rounds and must be at least 1, got "
                f"{sync_every!r}. Use sync_every=1 to exchange after every step."
            )


def check_length(sync_every: int | Sequence[int], num_workers: int) -> None:
    """Raise ValueError if a list does not have one number per worker."""
    if isinstance(sync_every, Sequence) and len(sync_every) != num_workers:
        raise ValueError(
            f"sync_every lists {len(sync_every)} numbers for {num_workers} workers, got "
            f"{list(sync_every)}. Give one number per worker, or a single one for all."
        )


def steps_by_speed(speeds: Sequence[float], sync_every: int) -> list[int]:
    r"""Convert measured speeds into a list for ``sync_every``.

    .. math:: H_i = \max(1, \lfloor H\, v_i / \max_j v_j \rfloor)

    Args:
        speeds: Local steps per second of each worker, or proportional numbers; positive.
        sync_every: Local steps H of the fastest worker between rounds, at least 1.

    Raises:
        ValueError: If ``speeds`` is empty, or a number is out of range.

    Source:
        The dynamic local updates (DyLU) of Liu et al., "Asynchronous Local-SGD Training for
        Language Modeling", arXiv:2401.09135.

    Example:
        >>> steps_by_speed([4.1, 4.0, 1.0], sync_every=50)
        [50, 48, 12]
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"speeds must be positive, one per worker, got {list(speeds)}. Give local steps per "
            "second, for example."
        )
    if sync_every < 1:
        raise ValueError(f"sync_every must be at least 1, got {sync_every}.")
    fastest = max(speeds)
    return [max(1, math.floor(sync_every * speed / fastest + _ROUNDING)) for speed in speeds]
