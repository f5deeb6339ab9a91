"""Outer learning rates that change from round to round.

``outer_lr`` is a number, or a picklable callable from the index of a round to its rate: one of
these schedules or your own function. The algorithm counts rounds in its state, so the count
continues in a resumed run, is equal on all workers, and is sent to workers that join later.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lightning_loco.algorithms.algorithm import State

OuterLR = float | Callable[[int], float]
"""A rate, or a function from the index of a round, starting at 0, to its rate."""

ROUNDS = "rounds"
"""The state entry that counts rounds."""


def _check_positive(name: str, rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise TypeError(
            f"{name} must be a number, or a schedule such as Cosine(0.7, 0.1, rounds=100), got "
            f"{rate!r}."
        )
    if not 0 < rate < math.inf:
        raise ValueError(f"{name} must be positive, got {rate}. A common value is 0.7.")


@dataclasses.dataclass(frozen=True)
class _Ramp(ABC):
    start: float
    end: float
    rounds: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _check_positive("start", self.start)
        _check_positive("end", self.end)
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int):
            raise TypeError(f"rounds must be an integer, got {self.rounds!r}.")
        if self.rounds < 1:
            raise ValueError(
                f"rounds must be at least 1, got {self.rounds}. Give the rounds of the run."
            )

    def __call__(self, round_index: int) -> float:
        """Return the rate of a round."""
        part = self._part(min(round_index / self.rounds, 1.0))
        return self.start * (1 - part) + self.end * part

    @abstractmethod
    def _part(self, progress: float) -> float:
        """Return the position between the rates, given the share of the rounds; both 0 to 1."""

    @property
    def highest(self) -> float:
        """The largest rate."""
        return max(self.start, self.end)


@dataclasses.dataclass(frozen=True)
class Linear(_Ramp):
    """Changes the rate linearly, then keeps it.

    Args:
        start: Rate of the first round, positive.
        end: Rate from round ``rounds`` on, positive.
        rounds: Number of rounds until ``end`` is reached, at least 1.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of range.

    Example:
        >>> [round(Linear(0.2, 0.8, rounds=3)(t), 2) for t in range(5)]  # a warm-up
        [0.2, 0.4, 0.6, 0.8, 0.8]
    """

    def _part(self, progress: float) -> float:
        return progress


@dataclasses.dataclass(frozen=True)
class Cosine(_Ramp):
    """Changes the rate along half a cosine, then keeps it.

    Args:
        start: Rate of the first round, positive.
        end: Rate from round ``rounds`` on, positive.
        rounds: Number of rounds until ``end`` is reached, at least 1.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of range.

    Example:
        >>> [round(Cosine(0.9, 0.1, rounds=4)(t), 2) for t in range(6)]
        [0.9, 0.78, 0.5, 0.22, 0.1, 0.1]
    """

    def _part(self, progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """Uses constant rates, one after another.

    Args:
        rates: A mapping from the round at which a rate begins to the rate; it must contain 0.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of range, or round 0 is missing.

    Example:
        >>> [Piecewise({0: 0.7, 3: 0.2})(t) for t in range(5)]
        [0.7, 0.7, 0.7, 0.2, 0.2]
    """

    rates: Mapping[int, float]

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not isinstance(self.rates, Mapping):
            raise TypeError(f"rates must be a mapping such as {{0: 0.7}}, got {self.rates!r}.")
        for begin, rate in self.rates.items():
            if isinstance(begin, bool) or not isinstance(begin, int):
                raise TypeError(f"rates begin at the number of a round, got {begin!r}.")
            _check_positive(f"the rate from round {begin} on", rate)
        if min(self.rates, default=-1) != 0:
            raise ValueError(f"rates must begin at round 0, got {dict(self.rates)}.")

    def __hash__(self) -> int:
        """Hash the rates, which a frozen dataclass cannot do for a mapping."""
        return hash(tuple(sorted(self.rates.items())))

    def __call__(self, round_index: int) -> float:
        """Return the rate of a round."""
        return self.rates[max(begin for begin in self.rates if begin <= round_index)]

    @property
    def highest(self) -> float:
        """The largest rate."""
        return max(self.rates.values())


def check_outer_lr(outer_lr: OuterLR) -> None:
    """Check that a rate, or the first rate of a schedule, is positive.

    Raises:
        TypeError: If it is neither a number nor a function from a round to one.
        ValueError: If the rate, or the rate of the first round, is not positive and finite.
    """
    if callable(outer_lr):
        _check_positive("outer_lr(0), the rate of the first round,", outer_lr(0))
    else:
        _check_positive("outer_lr", outer_lr)


def new_counter(outer_lr: OuterLR) -> State:
    """Return the state entries of a rate: a counter for a schedule, nothing for a number."""
    return {ROUNDS: 0} if callable(outer_lr) else {}


def rate_at(outer_lr: OuterLR, round_index: int) -> float:
    """Return the rate of a round.

    Raises:
        RuntimeError: If a schedule returns anything but a positive number.
    """
    if not callable(outer_lr):
        return outer_lr
    rate = outer_lr(round_index)
    try:
        _check_positive("outer_lr", rate)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"In round {round_index}: {error}") from error
    return rate


def next_rate(outer_lr: OuterLR, state: State) -> float:
    """Return the rate of the current round, and advance the counter if there is one."""
    rate = rate_at(outer_lr, state.get(ROUNDS, 0))
    if ROUNDS in state:
        state[ROUNDS] += 1
    return rate


def highest_rate(outer_lr: OuterLR) -> float:
    """Return the largest rate; for a user's function, which is not known, the first rate."""
    if not callable(outer_lr):
        return outer_lr
    return float(getattr(outer_lr, "highest", outer_lr(0)))


def outer_lr_metrics(outer_lr: OuterLR, state: State) -> dict[str, float]:
    """Return the rate of the last round if ``outer_lr`` is a schedule."""
    if not callable(outer_lr):
        return {}
    return {"outer_lr": rate_at(outer_lr, max(0, state[ROUNDS] - 1))}
