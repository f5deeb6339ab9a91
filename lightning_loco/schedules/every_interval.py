"""A schedule of rounds at intervals of time."""

from __future__ import annotations

import dataclasses
import math

from lightning_loco.schedules.schedule import Schedule, StepInfo


@dataclasses.dataclass(frozen=True)
class EveryInterval(Schedule):
    """Starts rounds by the clock while local steps continue, at any speed of a worker.

    Args:
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start without rounds.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    interval_s: float = 0.5
    warmup_steps: int = 0
    applies_at_sync_points = True

    def __post_init__(self) -> None:
        if isinstance(self.interval_s, bool) or not isinstance(self.interval_s, (int, float)):
            raise TypeError(f"interval_s must be a number of seconds, got {self.interval_s!r}.")
        if not 0 <= self.interval_s < math.inf:
            raise ValueError(
                f"interval_s must be at least 0 and finite, got {self.interval_s!r}. Use 0 to "
                "average without a pause."
            )
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int):
            raise TypeError(f"warmup_steps must be an integer, got {self.warmup_steps!r}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}.")

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        """Begin when the pause is over; end after the first step at which the result is there."""
        if info.steps < self.warmup_steps:
            return False, False
        if info.pending is None:
            return info.idle_s >= self.interval_s, False
        return False, info.pending.has_arrived()

    def is_overlapped(self, round_index: int) -> bool:
        """Return True: every round is overlapped."""
        return True

    @property
    def is_whole_phase(self) -> bool:
        """False: a pending round ends when its result has arrived."""
        return False

    def __str__(self) -> str:
        return f"a round after every {self.interval_s} s, {self.warmup_steps} steps of warm-up"
