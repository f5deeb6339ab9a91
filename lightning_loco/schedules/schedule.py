"""The base class of all schedules, which decide when rounds begin and end."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound="Schedule")


def reduce_ratio(counts: Sequence[int]) -> list[int]:
    """Divide whole numbers by their greatest common divisor: ``[50, 100]`` becomes ``[1, 2]``."""
    return [count // math.gcd(*counts) for count in counts]


class Pending(Protocol):
    """A round that has begun and is not applied yet, as a schedule sees it.

    Attributes:
        began_at: Local steps of this worker when it began.
    """

    began_at: int

    def has_arrived(self) -> bool:
        """Return whether its result has arrived; never waits."""


class StepInfo(NamedTuple):
    """The argument of :meth:`Schedule.due`: the situation of one fragment after a local step.

    Attributes:
        steps: Local steps of this worker so far.
        steps_since_round: Local steps since the last round began, of whichever fragment.
        round_index: Number of rounds begun; the next one exchanges fragment
            ``round_index % num_fragments``.
        fragment: Index of the fragment.
        idle_s: Seconds since the last round of this fragment ended; infinite before the first one.
        pending: The pending round of this fragment, or None.
    """

    steps: int
    steps_since_round: int
    round_index: int
    fragment: int
    idle_s: float
    pending: Pending | None


@dataclasses.dataclass(frozen=True)
class Schedule(ABC):
    """Decides when rounds begin and end; it holds settings only and does not communicate.

    A *fragment* is a part of the parameters that is exchanged as a whole. Round r exchanges
    fragment ``r % num_fragments``, so all workers agree on it.
    """

    applies_at_sync_points: ClassVar[bool] = False
    """Whether pending rounds are applied before validation and checkpoints; otherwise they remain
    pending."""

    num_fragments: ClassVar[int] = 1
    """Number of fragments."""

    @property
    def is_whole_phase(self) -> bool:
        """Whether every round ends at once or when the next round of its fragment begins."""
        return True

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """Return the slices of the flat parameter vector that each fragment consists of.

        Args:
            sizes: Number of elements by parameter name, in the order of the vector.

        Raises:
            ValueError: If the parameters cannot be divided into fragments as the settings say.
        """
        return [[range(sum(sizes.values()))]]

    @abstractmethod
    def due(self, info: StepInfo) -> tuple[bool, bool]:
        """Return whether a round of a fragment begins now, and whether its pending round ends."""

    @abstractmethod
    def is_overlapped(self, round_index: int) -> bool:
        """Return whether a round is still pending during the next local step."""

    def staleness_of(self, worker: int) -> float:
        """Return the delay of a result, in rounds; 0 if rounds follow the clock."""
        return float(self.is_overlapped(2**31) and self.sync_every_of(worker) is not None)

    def shortest_run(self, worker: int) -> int:
        """Return the least local steps of a worker for a run to end after its first result."""
        return 0

    def sync_every_of(self, worker: int) -> int | None:
        """Return a worker's local steps between rounds; None if rounds follow the clock."""
        return None

    def steps_of_round(self, worker: int, round_index: int) -> int | None:
        """Return a worker's local steps from the start of a round to the start of the next."""
        return self.sync_every_of(worker)

    def delay_of_round(self, worker: int, round_index: int) -> int | None:
        """Return a worker's local steps from the start of a round to its end; None if unknown."""
        return self.steps_of_round(worker, round_index) if self.is_overlapped(round_index) else 0

    def positions_in_round(self, round_index: int) -> int | None:
        """Return the number of positions in a round at which workers can agree to stop."""
        return self.sync_every_of(0)

    def metrics(self, round_index: int) -> dict[str, float]:
        """Return numbers to log about the next round, by name."""
        return {}

    def of_worker(self: S, worker: int) -> S:
        """Return the schedule of one worker, with one number instead of a list."""
        return self

    def shares(self, num_workers: int) -> list[int]:
        """Return the workers' shares of the data that give epochs of equally many rounds."""
        return reduce_ratio([self.sync_every_of(worker) or 1 for worker in range(num_workers)])

    def check(self, num_workers: int) -> None:  # noqa: B027
        """Raise ValueError if the settings do not fit this number of workers."""

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            key: list(value)
            if isinstance(value, Sequence) and not isinstance(value, str)
            else value
            for key, value in values.items()
        }

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.describe().items())
        return f"rounds by {type(self).__name__}({settings})"
