"""Runs rows in the pool and compares their outcomes with the expected ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

import torch

from tests.harness.pool import Pool, PoolError
from tests.lightning_matrix.row_run import (
    RANKS_PER_WORKER,
    REMOTE,
    WORKERS,
    Outcome,
    run_row,
    run_row_of_ranks,
)
from tests.lightning_matrix.table import AsDDP, Better, Refused, Row, Verdict

Outcomes = Sequence[Outcome]
"""The outcomes of all ranks."""

Queues = list[list[str]]
QueueOutcomes = tuple[list[str], list[Outcomes]]

SHARED_S, ALONE_S = 60.0, 20.0
"""Time limits for a row with several strategies, and with one, in seconds."""

SHOWN = 2000
"""Number of characters of an error that are shown."""

DIFFERENT = "workers end with different weights"


class Runs:
    """Runs rows with some strategies.

    Args:
        pool: The pool of processes.
        folder: Folder for their files.
    """

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._calls = 0

    def outcomes(self, row: Row, strategies: Sequence[str]) -> dict[str, Outcomes]:
        """Return the outcomes of a row with some strategies, and with DDP if needed.

        Strategies that should succeed share one call of the pool, in two queues at the same time;
        after the first failure each remaining strategy runs alone or with one other in a call, so
        that a failure affects few of them.
        """
        names = [name for name in strategies if name != REMOTE]
        if any(isinstance(row.of(name), AsDDP) for name in strategies):
            names.insert(0, "ddp")
        found: dict[str, Outcomes] = {}
        if names and not any(must_fail(row.of(name)) for name in names if name != "ddp"):
            queues = [queue for queue in (names[::2], names[1::2]) if queue]
            for queue, outcomes in self._call(row, queues, SHARED_S):
                found |= dict(zip(queue, takewhile(is_success, outcomes), strict=False))
        missing = [name for name in names if name not in found]
        for pair in zip_longest(missing[::2], missing[1::2]):
            queues = [[name] for name in pair if name is not None]
            for (name,), (outcomes,) in self._call(row, queues, ALONE_S):
                found[name] = outcomes
        for name in [*names, *([REMOTE] if REMOTE in strategies else [])]:
            if name not in found:
                found[name] = self._alone(row, name)
        return found

    def outcomes_of_ranks(self, row: Row, name: str) -> Outcomes:
        """Return the outcomes of a row on four ranks, with DDP or with workers of two ranks."""
        self._calls += 1
        folder = self._folder / str(self._calls)
        folder.mkdir()
        ranks = WORKERS * RANKS_PER_WORKER
        try:
            found: Outcomes = self._pool.run(
                run_row_of_ranks, name, row.run, str(folder), world=ranks, timeout_s=ALONE_S
            )
        except PoolError as error:
            text = f"{row.feature} under {name} within {ALONE_S:g} s: {error}"[:SHOWN]
            return [Outcome(error=text)] * ranks
        finally:
            rmtree(folder)
        return found

    def _alone(self, row: Row, name: str) -> Outcomes:
        try:
            ((_, (outcomes,)),) = self._try(row, [[name]], ALONE_S)
        except PoolError as error:
            text = f"{row.feature} under {name} within {ALONE_S:g} s: {error}"[:SHOWN]
            return [Outcome(error=text)] * (WORKERS + (name == REMOTE))
        return outcomes

    def _call(self, row: Row, queues: Queues, limit_s: float) -> Iterable[QueueOutcomes]:
        """Return the strategies of each queue with their outcomes; nothing if any rank is lost."""
        try:
            return self._try(row, queues, limit_s)
        except PoolError:
            return []

    def _try(self, row: Row, queues: Queues, limit_s: float) -> list[QueueOutcomes]:
        self._calls += 1
        folder = self._folder / str(self._calls)
        folder.mkdir()
        world = WORKERS + 1 if queues == [[REMOTE]] else WORKERS * len(queues)
        try:
            ranks = self._pool.run(
                run_row, queues, row.run, str(folder), world=world, timeout_s=limit_s
            )
        finally:
            rmtree(folder)
        parts = [ranks] if len(queues) == 1 else [ranks[:WORKERS], ranks[WORKERS:]]
        return [
            (queue, [[rank[name] for rank in part] for name in queue])
            for queue, part in zip(queues, parts, strict=True)
        ]


def is_success(outcomes: Outcomes) -> bool:
    """Return whether no rank has ended with an error."""
    return not any(outcome.error for outcome in outcomes)


def must_fail(verdict: Verdict) -> bool:
    """Return whether the run should end with an error."""
    return isinstance(verdict, Refused) or (isinstance(verdict, Better) and bool(verdict.error))


def problem(verdict: Verdict, outcomes: Outcomes, reference: Outcomes) -> str:
    """Describe the difference from the expected outcome; return an empty string if there is none.

    Args:
        verdict: The expected outcome.
        outcomes: The outcomes, by rank.
        reference: The outcomes with DDP, if they are compared.
    """
    errors = [outcome.error for outcome in outcomes]
    if isinstance(verdict, AsDDP) and reference[0].error:
        return missing_error(_first_line(reference[0].error), errors)
    if isinstance(verdict, Refused):
        return missing_error(verdict.message, errors)
    if isinstance(verdict, Better) and verdict.error:
        return missing_error(verdict.error, errors)
    if any(errors):
        return next(filter(None, errors))[:SHOWN]
    expected = [one.facts for one in reference] or [getattr(verdict, "facts", {})] * WORKERS
    if wrong := wrong_facts(expected, outcomes):
        return wrong
    wrong = wrong_weights(of_workers(outcomes))
    return "" if DIFFERENT in wrong and DIFFERENT in wrong_weights(reference) else wrong


Anything = TypeVar("Anything")


def of_workers(outcomes: Sequence[Anything]) -> Sequence[Anything]:
    """Return the outcomes of ranks that train: all but the server of a remote optimizer."""
    return outcomes[: len(outcomes) // WORKERS * WORKERS]


def _first_line(error: str) -> str:
    """Return the first line of an error without its type."""
    return error.partition(": ")[2].strip().partition("\n")[0][:80]


def missing_error(text: str, errors: Sequence[str]) -> str:
    """Describe ranks that ended without an error, or training ranks with another error."""
    if not all(errors):
        return f"no error on ranks {[rank for rank, error in enumerate(errors) if not error]}"
    others = [error[:SHOWN] for error in of_workers(errors) if text not in error]
    return f"not the error {text!r}, but {others[0]}" if others else ""


def wrong_facts(expected: Sequence[Mapping[str, object]], outcomes: Outcomes) -> str:
    """Describe the facts that differ on the first worker with a difference."""
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
    """Describe weights that are not finite, not equal, or not the mean of the written weights."""
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
