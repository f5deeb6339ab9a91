"""Runs rows in the pool, and says what is wrong with what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from shutil import rmtree

import torch

from tests.lightning_matrix.row_run import REMOTE, WORKERS, Outcome, run_row
from tests.lightning_matrix.table import AsDDP, Better, Refused, Row, Verdict
from tests.pool import Pool, PoolError

Outcomes = Sequence[Outcome]
"""Of all ranks."""

Lanes = list[list[str]]
LaneOutcomes = tuple[list[str], list[Outcomes]]

SHARED_S, ALONE_S = 60.0, 20.0
"""Longest time for a row under many strategies, and under one."""

SHOWN = 2000
"""Characters of a failure."""

DIFFERENT = "workers end with different weights"


class Runs:
    """Runs rows under some strategies.

    Args:
        pool: Where they run.
        folder: Where they may write.
    """

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._calls = 0

    def outcomes(self, row: Row, strategies: Sequence[str]) -> dict[str, Outcomes]:
        """What comes of a row under some strategies, and under DDP where one is compared with it.

        Those that should end well share one call of the pool, one after the other in two lanes;
        from the first one on that does not, each has a call of its own, or one that it shares with
        another beside it, so that it does no harm to others.
        """
        names = [name for name in strategies if name != REMOTE]
        if any(isinstance(row.of(name), AsDDP) for name in strategies):
            names.insert(0, "ddp")
        found: dict[str, Outcomes] = {}
        if names and not any(must_fail(row.of(name)) for name in names if name != "ddp"):
            lanes = [lane for lane in (names[::2], names[1::2]) if lane]
            for lane, outcomes in self._call(row, lanes, SHARED_S):
                found |= dict(zip(lane, takewhile(is_well, outcomes), strict=False))
        missing = [name for name in names if name not in found]
        for pair in zip_longest(missing[::2], missing[1::2]):
            lanes = [[name] for name in pair if name is not None]
            for (name,), (outcomes,) in self._call(row, lanes, ALONE_S):
                found[name] = outcomes
        for name in [*names, *([REMOTE] if REMOTE in strategies else [])]:
            if name not in found:
                found[name] = self._alone(row, name)
        return found

    def _alone(self, row: Row, name: str) -> Outcomes:
        try:
            ((_, (outcomes,)),) = self._try(row, [[name]], ALONE_S)
        except PoolError as error:
            text = f"{row.feature} under {name} within {ALONE_S:g} s: {error}"[:SHOWN]
            return [Outcome(error=text)] * (WORKERS + (name == REMOTE))
        return outcomes

    def _call(self, row: Row, lanes: Lanes, limit_s: float) -> Iterable[LaneOutcomes]:
        """The strategies of each lane and what has come of them; nothing if any rank is lost."""
        try:
            return self._try(row, lanes, limit_s)
        except PoolError:
            return []

    def _try(self, row: Row, lanes: Lanes, limit_s: float) -> list[LaneOutcomes]:
        self._calls += 1
        folder = self._folder / str(self._calls)
        folder.mkdir()
        world = WORKERS + 1 if lanes == [[REMOTE]] else WORKERS * len(lanes)
        try:
            ranks = self._pool.run(
                run_row, lanes, row.run, str(folder), world=world, timeout_s=limit_s
            )
        finally:
            rmtree(folder)
        parts = [ranks] if len(lanes) == 1 else [ranks[:WORKERS], ranks[WORKERS:]]
        return [
            (lane, [[rank[name] for rank in part] for name in lane])
            for lane, part in zip(lanes, parts, strict=True)
        ]


def is_well(outcomes: Outcomes) -> bool:
    """Whether no rank has ended with an error."""
    return not any(outcome.error for outcome in outcomes)


def must_fail(verdict: Verdict) -> bool:
    """Whether the run should end with an error of its own."""
    return isinstance(verdict, Refused) or (isinstance(verdict, Better) and bool(verdict.error))


def problem(verdict: Verdict, outcomes: Outcomes, reference: Outcomes) -> str:
    """What is not as it should be, or nothing.

    Args:
        verdict: What should come of it.
        outcomes: What has come of it, by rank.
        reference: What comes of it under DDP, if that is compared with.
    """
    errors = [outcome.error for outcome in outcomes]
    if isinstance(verdict, AsDDP) and reference[0].error:
        return no_error_with(_heart(reference[0].error), errors)
    if isinstance(verdict, Refused):
        return no_error_with(verdict.message, errors)
    if isinstance(verdict, Better) and verdict.error:
        return no_error_with(verdict.error, errors)
    if any(errors):
        return next(filter(None, errors))[:SHOWN]
    expected = [one.facts for one in reference] or [getattr(verdict, "facts", {})] * WORKERS
    if wrong := wrong_facts(expected, outcomes):
        return wrong
    wrong = wrong_weights(outcomes[:WORKERS])
    return "" if DIFFERENT in wrong and DIFFERENT in wrong_weights(reference) else wrong


def _heart(error: str) -> str:
    """The first line of an error without its type."""
    return error.partition(": ")[2].strip().partition("\n")[0][:80]


def no_error_with(text: str, errors: Sequence[str]) -> str:
    """What is wrong if all ranks should end with an error, and those that train with this one."""
    if not all(errors):
        return f"no error on ranks {[rank for rank, error in enumerate(errors) if not error]}"
    others = [error[:SHOWN] for error in errors[:WORKERS] if text not in error]
    return f"not the error {text!r}, but {others[0]}" if others else ""


def wrong_facts(expected: Sequence[Mapping[str, object]], outcomes: Outcomes) -> str:
    """What differs from what is expected, on the first worker on which something does."""
    for worker, (right, outcome) in enumerate(zip(expected, outcomes, strict=False)):
        wrong = [
            f"{key} is {outcome.facts.get(key)!r} instead of {value!r}"
            for key, value in right.items()
            if outcome.facts.get(key) != value
        ]
        if wrong:
            return f"on worker {worker} " + ", ".join(wrong)
    return ""


def wrong_weights(outcomes: Outcomes) -> str:
    """Whether weights are not finite, not equal, or not the mean of what was written."""
    for models in zip(*(outcome.models for outcome in outcomes), strict=True):
        if not all(torch.isfinite(model).all() for model in models):
            return "weights are not finite"
        if not all(torch.equal(model, models[0]) for model in models):
            apart = (models[1] - models[0]).abs().max()
            return f"{DIFFERENT}, {apart:.2g} apart"
    for pairs in zip(*(outcome.written for outcome in outcomes), strict=True):
        mean = torch.stack([written for _, written in pairs]).mean(0)
        away = max(float((final - mean).abs().max()) for final, _ in pairs)
        if away > 1e-5:
            return f"the final weights are {away:.2g} away from the mean of what was written"
    return ""
