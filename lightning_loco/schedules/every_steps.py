"""A schedule of rounds after a fixed number of local steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lightning_loco.schedules.base import Schedule, StepInfo

_ROUNDING = 1e-9


def check_sync_every(sync_every: object) -> None:
    """Check a number of local steps, or a list of them.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is smaller than 1.
    """
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
        """Check types and ranges."""
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

    def positions_in_round(self, round_index: int) -> int:
        """Return the number of local steps of a round."""
        return self.sync_every_of(0)

    def of_worker(self, worker: int) -> EverySteps:
        """Return the schedule with the number of this worker instead of a list."""
        return dataclasses.replace(self, sync_every=self.sync_every_of(worker))

    def check(self, num_workers: int) -> None:
        """Raise ValueError if a list does not have one number per worker."""
        check_length(self.sync_every, num_workers)

    def __str__(self) -> str:
        return f"a round every {self.sync_every} local steps"


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
