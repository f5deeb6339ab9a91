"""When a round begins and when it ends."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound="Schedule")


class UnderWay(Protocol):
    """A round that has begun and not ended."""

    def has_arrived(self) -> bool:
        """Whether all that it sent for is here; never waits."""


class Now(NamedTuple):
    """What a schedule is asked with, after a local step.

    Attributes:
        steps: Local steps of this worker so far.
        steps_since_round: Local steps since the last round began.
        round_index: Rounds begun; the next one moves lane ``round_index % num_lanes``.
        lane: Which lane is asked for.
        idle_s: Seconds since a flight of this lane ended; infinite before the first one.
        flight: The flight of this lane that is under way, or None.
    """

    steps: int
    steps_since_round: int
    round_index: int
    lane: int
    idle_s: float
    flight: UnderWay | None


@dataclasses.dataclass(frozen=True)
class Schedule(ABC):
    """Decides when rounds begin and end; it holds settings only and does not communicate.

    A *lane* is a part of the parameters that is exchanged as a whole. Round r moves lane
    ``r % num_lanes``, so that all workers agree on it.
    """

    lands_at_meetings: ClassVar[bool] = False
    """Whether flights end before validation and checkpoints; otherwise they stay under way."""

    num_lanes: ClassVar[int] = 1
    """In how many parts the parameters are exchanged."""

    def lanes(self, sizes: Sequence[int]) -> list[list[range]]:
        """The stretches of the flat vector that each lane consists of.

        Args:
            sizes: Elements of each trainable parameter, in the order of the vector.
        """
        return [[range(sum(sizes))]]

    @abstractmethod
    def due(self, now: Now) -> tuple[bool, bool]:
        """Whether a round of this lane begins now, and whether the flight under way ends now."""

    @abstractmethod
    def stays(self, round_index: int) -> bool:
        """Whether a round is still under way when the next local step is made."""

    def sync_every_of(self, worker: int) -> int | None:
        """Local steps of one worker between rounds; None if rounds do not go by steps."""
        return None

    def of_worker(self: S, worker: int) -> S:
        """What holds for one worker."""
        return self

    def shares(self, num_workers: int) -> list[int]:
        """In which proportion the workers share the data, so that epochs hold equal rounds."""
        steps = [self.sync_every_of(worker) or 1 for worker in range(num_workers)]
        return [count // math.gcd(*steps) for count in steps]

    def check(self, num_workers: int) -> None:  # noqa: B027
        """Raise ValueError if the settings do not fit so many workers."""

    def describe(self) -> dict[str, Any]:
        """The settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, Sequence) else v for k, v in values.items()}

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.describe().items())
        return f"rounds by {type(self).__name__}({settings})"


@dataclasses.dataclass(frozen=True)
class EverySteps(Schedule):
    """A round after so many local steps.

    Args:
        sync_every: Local steps between rounds, at least 1; or one number per worker.
        overlap: A round ends when the next one begins, instead of at once.
        warm_start: With overlap, the first round ends at once.

    Raises:
        TypeError: If ``sync_every`` does not consist of integers.
        ValueError: If one of them is smaller than 1.

    Example:
        >>> EverySteps(10).due(Now(30, 10, 2, 0, 1.0, None))
        (True, False)
    """

    sync_every: int | Sequence[int] = 100
    overlap: bool = False
    warm_start: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        several = isinstance(self.sync_every, Sequence) and not isinstance(self.sync_every, str)
        for steps in self.sync_every if several else [self.sync_every]:  # type: ignore[union-attr]
            if isinstance(steps, bool) or not isinstance(steps, int):
                raise TypeError(
                    "sync_every counts optimizer steps between rounds and must be an integer (or a "
                    f"list with one per worker), got {self.sync_every!r}."
                )
            if steps < 1:
                raise ValueError(
                    "sync_every counts optimizer steps between rounds and must be at least 1, got "
                    f"{self.sync_every!r}. Use sync_every=1 to exchange after every step."
                )

    def due(self, now: Now) -> tuple[bool, bool]:
        """Both at the same time: a flight under way ends when the next one begins."""
        due = now.steps_since_round >= self.sync_every  # type: ignore[operator]
        return due, due and now.flight is not None

    def stays(self, round_index: int) -> bool:
        """With overlap, but for the first round of a warm start."""
        return self.overlap and not (self.warm_start and round_index < self.num_lanes)

    def sync_every_of(self, worker: int) -> int:
        """Local steps of one worker between rounds."""
        return self.sync_every if isinstance(self.sync_every, int) else self.sync_every[worker]

    def of_worker(self, worker: int) -> EverySteps:
        """The number of this worker instead of a list."""
        return dataclasses.replace(self, sync_every=self.sync_every_of(worker))

    def check(self, num_workers: int) -> None:
        """Refuse a list of another length."""
        if isinstance(self.sync_every, Sequence) and len(self.sync_every) != num_workers:
            raise ValueError(
                f"sync_every lists {len(self.sync_every)} numbers for {num_workers} workers, got "
                f"{list(self.sync_every)}. Give one number per worker, or a single one for all."
            )

    def __str__(self) -> str:
        return f"a round every {self.sync_every} local steps"


@dataclasses.dataclass(frozen=True)
class EveryInterval(Schedule):
    """Rounds by the clock, while local steps go on; a worker may make as many as it likes.

    Args:
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start without rounds.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    interval_s: float = 0.5
    warmup_steps: int = 0
    lands_at_meetings = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if isinstance(self.interval_s, bool) or not isinstance(self.interval_s, (int, float)):
            raise TypeError(f"interval_s must be a number of seconds, got {self.interval_s!r}.")
        if not 0 <= self.interval_s < math.inf:
            raise ValueError(
                f"interval_s must be at least 0 and finite, got {self.interval_s!r}. Use 0 to "
                "average again and again without a pause."
            )
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int):
            raise TypeError(f"warmup_steps must be an integer, got {self.warmup_steps!r}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}.")

    def due(self, now: Now) -> tuple[bool, bool]:
        """Begin when the pause is over; end after the first step by which everything is here."""
        if now.steps < self.warmup_steps:
            return False, False
        if now.flight is None:
            return now.idle_s >= self.interval_s, False
        return False, now.flight.has_arrived()

    def stays(self, round_index: int) -> bool:
        """Always."""
        return True

    def __str__(self) -> str:
        return f"a round after every {self.interval_s} s, {self.warmup_steps} steps of warm-up"
