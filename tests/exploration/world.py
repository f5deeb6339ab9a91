"""What is explored: a world of tasks, the faults it may have, and a history of what happened."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from tests.exploration.scheduler import Fault, Scheduler

R = TypeVar("R")


class History:
    """What happened in a run, in order: the records of :mod:`tests.exploration.records`."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def add(self, record: Any) -> None:
        """Add a record."""
        self.records.append(record)

    def of(self, kind: type[R]) -> Iterator[R]:
        """Yield the records of one kind, in order."""
        return (record for record in self.records if isinstance(record, kind))


class World(ABC):
    """One job, run by the tasks of a scheduler.

    A world starts the real state machines, gives them models of what they use (a network, a store,
    a lighthouse, a disk), and adds records to the history, which the properties read.

    Args:
        settings: A result of :meth:`draw`; plain values, so that they can be saved.

    Attributes:
        name: Its name on the command line.
        covered: Modules whose branches count as explored by it.
        limit_s: Longest virtual time from the last fault to the end: no wait may be longer.
        longest_stall_s: How far time may pass at once while something else could happen.
        scheduler: Runs its tasks.
        history: What happened so far.
    """

    name: ClassVar[str]
    covered: ClassVar[tuple[str, ...]] = ()
    limit_s: ClassVar[float] = 3600.0
    max_events: ClassVar[int] = 20_000
    longest_stall_s: ClassVar[float] = math.inf
    scheduler: Scheduler

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.history = History()

    @classmethod
    @abstractmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        """Draw the settings of a run: its size, its method, and what may go wrong."""

    @abstractmethod
    def start(self) -> None:
        """Start the first tasks; ``scheduler`` is set."""

    def faults(self) -> Mapping[str, Fault]:
        """Return what may go wrong now. The first word of a name is its kind: ``"kill w1"``."""
        return {}

    def on_point(self, point: str) -> None:
        """Called in the task that reaches a fault point; by default the task waits there."""
        if self.scheduler.is_in_task:
            self.scheduler.wait(f"the fault point {point!r}")

    def end(self) -> None:  # noqa: B027
        """Add records of what is left when all tasks have ended."""

    @classmethod  # noqa: B027
    def forget(cls) -> None:
        """Forget what was computed in other runs, because the code has changed."""

    def close(self) -> None:  # noqa: B027
        """Free what the world holds, also after an error."""
