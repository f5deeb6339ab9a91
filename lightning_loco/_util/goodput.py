"""Goodput: the share of a worker's time in local steps whose progress counts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

STRAGGLES = 1.25
"""A worker is a straggler if its local steps take at least this many times the median."""

MIN_ROUNDS, MOST_ROUNDS = 10, 50
"""Rounds that it takes to say so, and the last ones that are looked at."""


class SpentTime(NamedTuple):
    """Local steps and seconds of a worker, measured or simulated.

    Attributes:
        steps: Local steps that it has made.
        time_s: All its time.
        compute_s: In local steps.
        wait_s: Waiting for other workers or for a link.
        join_s: Waiting for the parameters of the run.
        away_s: Dead, or starting again.
    """

    steps: int
    time_s: float
    compute_s: float
    wait_s: float
    join_s: float
    away_s: float


class Counted(NamedTuple):
    """Local steps, as means over the fragments.

    Attributes:
        merged: Those whose progress has entered a merge.
        pending: Those whose progress may still do so.
    """

    merged: float
    pending: float


class Goodput(NamedTuple):
    """Shares of a worker's time, from 0 to 1, which add up to 1.

    Attributes:
        merged: Local steps whose progress has entered a merge. A local step moves all fragments,
            so a part of it may have entered one.
        pending: Local steps that may still enter one.
        lost: Other local steps: a result that has arrived has overwritten them, they have ended in
            NaN, or the worker has died after them.
        waiting: Waiting for other workers or for a link.
        joining: Waiting for the parameters of the run.
        away: Dead, or starting again.
    """

    merged: float
    pending: float
    lost: float
    waiting: float
    joining: float
    away: float

    @classmethod
    def of(cls, spent: SpentTime, counted: Counted) -> Goodput:
        """Return the shares of a worker's time; ValueError if it has none."""
        if spent.time_s == 0:
            raise ValueError("The worker has no time yet.")
        step_s = spent.compute_s / spent.steps if spent.steps else 0.0
        merged, pending = (step_s * steps / spent.time_s for steps in counted)
        others = [seconds / spent.time_s for seconds in spent[3:]]
        return cls(merged, pending, max(0.0, 1.0 - merged - pending - sum(others)), *others)

    @property
    def parts(self) -> dict[str, float]:
        """The shares by the names that they are shown with; what is pending is not lost."""
        shown = self.merged + self.pending, self.waiting, self.joining, self.lost, self.away
        return dict(zip(PARTS, shown, strict=True))


PARTS = ("goodput", "waiting", "joining", "lost", "restarting")
"""What a worker's time is for, as it is shown."""


class Straggler(NamedTuple):
    """A worker whose local steps take long.

    Attributes:
        worker: Its number.
        ratio: Seconds of its local steps, in times of the median over the workers.
        rounds: In how many rounds.
    """

    worker: int
    ratio: float
    rounds: int

    def __str__(self) -> str:
        """The verdict; the number of an elastic member is its place in the last round."""
        times = f"{self.ratio:.1f}x the median step"
        return f"worker {self.worker} took {times} in the last {self.rounds} rounds"


def find_straggler(rounds: Sequence[Sequence[float]]) -> Straggler | None:
    """Return the slowest worker, if it is a straggler.

    Args:
        rounds: Of each round the seconds of a local step of each worker; 0 if not known.
    """
    ratios: dict[int, list[float]] = {}
    for times in rounds:
        known = [step_s for step_s in times if step_s > 0]
        for worker, step_s in enumerate(times if len(known) > 1 else ()):
            if step_s > 0:
                ratios.setdefault(worker, []).append(step_s / median_low(known))
    found = [
        Straggler(worker, median(own), len(own))
        for worker, own in ratios.items()
        if len(own) >= MIN_ROUNDS
    ]
    slowest = max(found, key=lambda one: one.ratio, default=None)
    return slowest if slowest is not None and slowest.ratio >= STRAGGLES else None
