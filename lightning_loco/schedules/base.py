"""The contract of every schedule: when a round begins and when it ends."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound="Schedule")


def proportion(counts: Sequence[int]) -> list[int]:
    """The smallest whole numbers in the same proportion: 1, 2 for 50, 100."""
    return [count // math.gcd(*counts) for count in counts]


class UnderWay(Protocol):
    """A round that has begun and not ended.

    Attributes:
        began_at: Local steps of this worker when it began.
    """

    began_at: int

    def has_arrived(self) -> bool:
        """Whether all that it sent for is here; never waits."""


class Now(NamedTuple):
    """What a schedule is asked with, after a local step.

    Attributes:
        steps: Local steps of this worker so far.
        steps_since_round: Local steps since the last round began.
        round_index: Rounds begun; the next one moves fragment ``round_index % num_fragments``.
        fragment: Which fragment is asked for.
        idle_s: Seconds since a pending round of this fragment ended; infinite before the first one.
        pending: The pending round of this fragment that is under way, or None.
    """

    steps: int
    steps_since_round: int
    round_index: int
    fragment: int
    idle_s: float
    pending: UnderWay | None


@dataclasses.dataclass(frozen=True)
class Schedule(ABC):
    """Decides when rounds begin and end; it holds settings only and does not communicate.

    A *fragment* is a part of the parameters that is exchanged as a whole. Round r moves fragment
    ``r % num_fragments``, so that all workers agree on it.
    """

    applies_at_sync_points: ClassVar[bool] = False
    """Whether pending rounds end before validation and checkpoints; else they stay pending."""

    num_fragments: ClassVar[int] = 1
    """In how many parts the parameters are exchanged."""

    @property
    def is_whole_phase(self) -> bool:
        """Whether a pending round ends when the next of its fragment begins, or at once."""
        return True

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The stretches of the flat vector that each fragment consists of.

        Args:
            sizes: Elements of each trainable parameter by its name, in the order of the vector.

        Raises:
            ValueError: If these parameters cannot be divided so.
        """
        return [[range(sum(sizes.values()))]]

    @abstractmethod
    def due(self, now: Now) -> tuple[bool, bool]:
        """Whether a round of this fragment begins now, and whether its pending round ends now."""

    @abstractmethod
    def is_overlapped(self, round_index: int) -> bool:
        """Whether a round is still under way when the next local step is made."""

    def staleness_of(self, worker: int) -> float:
        """Rounds from the begin of a round to its end; 0 if they do not go by steps."""
        return float(self.is_overlapped(2**31) and self.sync_every_of(worker) is not None)

    def shortest_run(self, worker: int) -> int:
        """Local steps of one worker that a run needs, not to be over before a result has come."""
        return 0

    def sync_every_of(self, worker: int) -> int | None:
        """Local steps of one worker between rounds; None if rounds do not go by steps."""
        return None

    def steps_of_round(self, worker: int, round_index: int) -> int | None:
        """Local steps of one worker from the begin of a round to that of the next."""
        return self.sync_every_of(worker)

    def steps_under_way(self, worker: int, round_index: int) -> int | None:
        """Local steps of one worker from the begin of a round to its end, if they are known."""
        return self.steps_of_round(worker, round_index) if self.is_overlapped(round_index) else 0

    def places_in(self, round_index: int) -> int | None:
        """Into how many parts a round is divided where workers agree on a step to stop at."""
        return self.sync_every_of(0)

    def metrics(self, round_index: int) -> dict[str, float]:
        """What is logged of the round that comes next, by name."""
        return {}

    def of_worker(self: S, worker: int) -> S:
        """What holds for one worker."""
        return self

    def shares(self, num_workers: int) -> list[int]:
        """In which proportion the workers share the data, so that epochs hold equal rounds."""
        return proportion([self.sync_every_of(worker) or 1 for worker in range(num_workers)])

    def check(self, num_workers: int) -> None:  # noqa: B027
        """Raise ValueError if the settings do not fit so many workers."""

    def describe(self) -> dict[str, Any]:
        """The settings as plain values."""
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
