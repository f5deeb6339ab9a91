"""What the runs of one library on one link come to, and the row of the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import against, spread

from libraries.table import ALONE, ENTRIES, OURS
from libraries.training import Result

HEADER = (
    "library", "blocking ms", "waited ms", "sent MB a round", "more a local step, us",
    "memory MB", "val loss", "wall s", "ours / it", "bound",
)  # fmt: skip
MB = 1e6


@dataclass(frozen=True)
class Run:
    """One run, over its workers.

    Attributes:
        blocking_ms: Of each counted round, until the last worker is done.
        waited_ms: The training thread's waiting in it.
        sent: Bytes per worker and round.
        step_ms: Median of the local steps that end no phase.
        peak: Bytes of memory, of the worker that needs most.
        val_loss: Mean over the workers' models.
        wall_s: Of all counted rounds.
    """

    blocking_ms: list[float]
    waited_ms: list[float]
    sent: float
    step_ms: float
    peak: float
    val_loss: float
    wall_s: float


def summarise(results: Sequence[Result], alone: Sequence[Result], every: int) -> Run:
    """Put the workers' results together.

    A library that communicates in every step has no rounds: its ``every`` steps minus as many local
    steps of workers that are alone stand for one.
    """
    rounds = list(zip(*(result.rounds for result in results), strict=True))
    blocking = [1000 * max(span.wall_s for span in spans) for spans in rounds]
    waited = [1000 * max(span.waited_s for span in spans) for spans in rounds]
    if results[0].every_step:
        wall, base_wall = (_middle(of, lambda span: span.wall_s) for of in (results, alone))
        wait, base_wait = (_middle(of, lambda span: span.waited_s) for of in (results, alone))
        blocking, waited = [every * (wall - base_wall)], [every * (wait - base_wait)]
    return Run(
        blocking_ms=blocking,
        waited_ms=waited,
        sent=statistics.fmean(result.bytes_sent for result in results) / len(rounds),
        step_ms=_middle(results, lambda span: span.wall_s),
        peak=max(result.peak_bytes for result in results),
        val_loss=statistics.fmean(result.val_loss for result in results),
        wall_s=max(result.wall_s for result in results),
    )


def _middle(results: Sequence[Result], of: Callable[..., float]) -> float:
    """Median in milliseconds over the local steps of all workers."""
    return 1000 * statistics.median(of(span) for result in results for span in result.steps)


Runs = dict[str, list[Run | None]]
"""The runs of each library, one for each repetition; None for one that failed."""


def row(key: str, runs: Runs, with_bound: bool) -> list[str]:
    """A library's line in the table."""
    done = [run for run in runs[key] if run is not None]
    title = ENTRIES[key].title
    if len(done) < len(runs[key]):
        title += f" ({len(done)} of {len(runs[key])} runs)"
    more, memory = (
        [value(run) - value(base) for run, base in pairs(runs, key, ALONE)]
        for value in (lambda run: 1000 * run.step_ms, lambda run: run.peak / MB)
    )
    cells = [
        spread([ms for run in done for ms in run.blocking_ms], 1),
        spread([ms for run in done for ms in run.waited_ms], 1),
        f"{statistics.median(run.sent for run in done) / MB:.2f}",
        spread(more, 0),
        f"{statistics.median(memory):.0f}" if memory else "-",
        spread([run.val_loss for run in done], 4),
        spread([run.wall_s for run in done], 1),
    ]
    if key == ALONE:
        peak = statistics.median(run.peak for run in done) / MB
        step_ms = statistics.median(run.step_ms for run in done)
        cells[:5] = ["-", "-", cells[2], f"({step_ms:.1f} ms)", f"({peak:.0f})"]
    found = ratios(runs, key)
    if not found or key in (ALONE, OURS):
        return [title, *cells, "-", "-"]
    bound = ENTRIES[key].bound
    middle = statistics.median(found)
    shown = against(middle, bound) if with_bound and bound is not None else "-"
    return [title, *cells, spread(found), shown]


def ratios(runs: Runs, key: str) -> list[float]:
    """Our blocking time to a library's, in each repetition in which both came to an end.

    Without those in which a busy machine made steps with communication shorter than those without.
    """
    both = pairs(runs, OURS, key)
    medians = [[statistics.median(run.blocking_ms) for run in pair] for pair in both]
    return [ours / theirs for ours, theirs in medians if theirs > 0]


def pairs(runs: Runs, key: str, other: str) -> list[tuple[Run, Run]]:
    """The repetitions in which two libraries came to an end."""
    both = zip(runs.get(key, []), runs.get(other, []), strict=False)
    return [(a, b) for a, b in both if a is not None and b is not None]
