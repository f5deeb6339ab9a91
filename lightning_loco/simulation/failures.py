"""Failures of simulated workers, which come and go like the members of an elastic run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from lightning_loco.algorithms import Algorithm
from lightning_loco.elastic.elastic import prepare_for_members
from lightning_loco.topology import Topology

NOTICED_AFTER_S = 5.0
"""Seconds without a heartbeat after which a worker is dead, as at the lighthouse."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that dies, and may come back.

    Rounds wait for it until the others notice its death. The local step under way is lost.

    Args:
        worker: Index of the worker.
        at_s: When it dies, in seconds from the start of the simulation.
        back_s: When it is back, at least ``noticed_after_s`` later than ``at_s``, because it joins
            as a new member; None for never.
        noticed_after_s: Seconds after which the others notice that it is dead.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> Failure(worker=2, at_s=100.0, back_s=160.0)
        Failure(worker=2, at_s=100.0, back_s=160.0, noticed_after_s=5.0)
    """

    worker: int
    at_s: float
    back_s: float | None = None
    noticed_after_s: float = NOTICED_AFTER_S

    def __post_init__(self) -> None:
        if self.worker < 0 or not 0 <= self.at_s < math.inf or self.noticed_after_s < 0:
            raise ValueError(
                "A failure has a worker from 0 on, and times in seconds, at least 0 and finite, "
                f"got {self}."
            )
        if self.back_s is not None and self.back_s < self.at_s + self.noticed_after_s:
            raise ValueError(
                f"A worker can come back after the others have noticed that it was dead, at "
                f"{self.at_s + self.noticed_after_s:g} s or later, got back_s={self.back_s:g}."
            )

    def events(self) -> Iterator[tuple[Literal["death", "noticed", "return"], float]]:
        """Yield the events of this failure with their times."""
        yield "death", self.at_s
        yield "noticed", self.at_s + self.noticed_after_s
        if self.back_s is not None:
            yield "return", self.back_s


def random_failures(
    num_workers: int,
    until_s: float,
    mean_between_s: float,
    mean_away_s: float,
    seed: int = 0,
    noticed_after_s: float = NOTICED_AFTER_S,
) -> list[Failure]:
    """Draw failures: the times between failures, and until a return, are exponential.

    Args:
        num_workers: Number of workers N.
        until_s: No worker dies later than this, in seconds.
        mean_between_s: Mean seconds from the start or a return of a worker to its next failure.
        mean_away_s: Mean seconds until it is back, beyond ``noticed_after_s``.
        seed: Seed of the draws.
        noticed_after_s: As in :class:`Failure`.

    Raises:
        ValueError: If a time is not positive and finite.

    Example:
        >>> failures = random_failures(4, until_s=3600, mean_between_s=1800, mean_away_s=60)
        >>> sorted({failure.worker for failure in failures})
        [0, 2, 3]
    """
    for name, value in (
        ("until_s", until_s),
        ("mean_between_s", mean_between_s),
        ("mean_away_s", mean_away_s),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is in seconds, positive and finite, got {value!r}.")
    found = []
    for worker in range(num_workers):
        draws, now_s = np.random.default_rng((seed, worker)), 0.0
        while (now_s := now_s + draws.exponential(mean_between_s)) <= until_s:
            back_s = now_s + noticed_after_s + draws.exponential(mean_away_s)
            found.append(Failure(worker, now_s, back_s, noticed_after_s))
            now_s = back_s
    return sorted(found, key=lambda failure: failure.at_s)


@dataclasses.dataclass(frozen=True)
class MembersOfSimulation:
    """The membership of simulated workers: elastic, without a lighthouse.

    Args:
        failures: The failures of all workers.
    """

    failures: tuple[Failure, ...]
    min_workers: int = 1

    def check(self, num_workers: int) -> None:
        """Raise ValueError if a failure names an unknown worker, or one that is dead already."""
        alive_from = [0.0] * num_workers
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            if failure.worker >= num_workers:
                raise ValueError(
                    f"failures name worker {failure.worker}, but there are {num_workers} workers, "
                    f"numbered 0 to {num_workers - 1}."
                )
            if failure.at_s < alive_from[failure.worker]:
                raise ValueError(f"Worker {failure.worker} is dead already at {failure.at_s:g} s.")
            alive_from[failure.worker] = math.inf if failure.back_s is None else failure.back_s

    def prepare(self, algorithm: Algorithm, topology: Topology | None, is_late: bool) -> Algorithm:
        """Check the algorithm, as for elastic members."""
        return prepare_for_members(algorithm, topology, is_late)
