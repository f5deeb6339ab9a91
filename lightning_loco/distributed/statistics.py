"""Statistics of communication: bytes, seconds and rounds, and a timeline of a rank."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import InitVar
from typing import Any

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.goodput import (
    MOST_ROUNDS,
    Counted,
    Goodput,
    SpentTime,
    Straggler,
    find_straggler,
)

Span = tuple[str, float, float]
"""Kind, start and end in seconds of the clock."""

_SPENT = ("steps", "lost_steps", "time_s", "join_s", "away_s")

IN_BACKGROUND = ("round", "send")
"""Kinds of spans in which a rank does something else at the same time."""


class Spans:
    """Timeline of a rank: the first and the last spans of time, and the sums of all.

    Args:
        limit: Number of first spans to keep, and of last ones.

    Attributes:
        seconds: Of all spans, by kind; time within several spans counts for the innermost one,
            apart from those in the background.
        busy_s: Of all spans but those in the background.
        left_out: How many spans between the first and the last ones are not kept.
    """

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.seconds: dict[str, float] = {}
        self.busy_s = 0.0
        self.left_out = 0
        self._counted: deque[tuple[float, float]] = deque(maxlen=limit)
        self._first: list[Span] = []
        self._last: deque[Span] = deque(maxlen=limit)

    def add(self, kind: str, start_s: float, end_s: float) -> None:
        """Add a span that has ended, after all that ended before."""
        before_s, own_s = self.busy_s, end_s - start_s
        if kind not in IN_BACKGROUND:
            self._count(start_s, end_s)
            own_s = max(0.0, self.busy_s - before_s)
        self.seconds[kind] = self.seconds.get(kind, 0.0) + own_s
        if len(self._first) < self.limit:
            self._first.append((kind, start_s, end_s))
            return
        self.left_out += len(self._last) == self.limit
        self._last.append((kind, start_s, end_s))

    def _count(self, start_s: float, end_s: float) -> None:
        while self._counted and self._counted[-1][1] > start_s:
            first_s, last_s = self._counted.pop()
            self.busy_s -= last_s - first_s
            start_s = min(start_s, first_s)
        self._counted.append((start_s, end_s))
        self.busy_s += end_s - start_s

    def kept(self) -> list[Span]:
        """Return the first and the last spans, in the order in which they ended."""
        return [*self._first, *self._last]


@dataclasses.dataclass
class Statistics:
    """Counters of one rank since the start of training, and metrics of its worker's last round.

    Args:
        clock: It is read when the training begins, which is now.

    Attributes:
        rounds: Completed rounds.
        bytes_sent: Payload bytes sent by this rank; a ring all-reduce of B bytes counts as
            2 (N - 1) / N * B.
        bytes_saved: How many more bytes it would have sent without compression.
        wait_s: Seconds for which this rank was blocked in exchanges.
        resumed_wait_s: Those of earlier runs, which this run resumes; part of ``wait_s``.
        other_ranks_bytes_sent: Bytes sent by the other ranks of its worker until the last round.
        longest_wait_s: Longest wait of a rank of its worker until then, in seconds.
        staleness: Delay between sending and applying: in rounds (0, or 1 with overlap, or a
            fraction), or in local steps (of the last round with a time-based schedule, or by which
            a peer was behind).
        outer_grad_norm: Norm of the last pseudo-gradient; None unless monitored.
        persistence: Cosine of the last two pseudo-gradients of the fragment that was exchanged
            last, from a sample of its elements; None unless monitored.
        consensus_distance: Root mean square distance of the workers' parameters to their mean,
            just before the last measured round; if none was measured, at the end of training.
        losses: Last training loss of each worker at the last round; NaN if unknown.
        members: Number of workers in the last round of an elastic group; None without one.
        repaired: How often a member had drifted from the others and has received their state.
        steps: Local steps that this worker has made itself; it may have received others.
        lost_steps: Those whose progress was thrown away, as a mean over the fragments.
        join_s: Seconds for which it has waited for the parameters of the run.
        away_s: Seconds between the checkpoints that it has resumed from and the resumptions.
        participation: Share of the workers with weight in the last round; None if not known.
        step_times: Seconds of a local step of each worker, in the last rounds; 0 if unknown.
        spans: When this rank waited, ran rounds and was at sync points; None unless recorded.
    """

    rounds: int = 0
    bytes_sent: int = 0
    bytes_saved: int = 0
    wait_s: float = 0.0
    resumed_wait_s: float = dataclasses.field(default=0.0, compare=False)
    staleness: float = 0
    outer_grad_norm: float | None = None
    persistence: float | None = None
    consensus_distance: float | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    members: int | None = None
    repaired: int = 0
    other_ranks_bytes_sent: int = 0
    longest_wait_s: float = 0.0
    steps: int = 0
    lost_steps: float = 0.0
    join_s: float = 0.0
    away_s: float = dataclasses.field(default=0.0, compare=False)
    participation: float | None = None
    step_times: deque[list[float]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=MOST_ROUNDS), compare=False, repr=False
    )
    spans: Spans | None = dataclasses.field(default=None, compare=False, repr=False)
    clock: InitVar[Clock] = REAL_CLOCK

    def __post_init__(self, clock: Clock) -> None:
        """Begin to count the time of this worker."""
        self._clock, self._began_s = clock, clock.now()

    @property
    def time_s(self) -> float:
        """Seconds since the start, in earlier processes of this run, too."""
        return self._clock.now() - self._began_s

    @property
    def spent(self) -> SpentTime:
        """What the time was spent on; all that is not counted as something else is computing."""
        time_s, others = self.time_s, (self.wait_s, self.join_s, self.away_s)
        return SpentTime(self.steps, time_s, max(0.0, time_s - sum(others)), *others)

    @property
    def goodput(self) -> Goodput | None:
        """What the time was for; None before the first step.

        Progress counts from the start, unless it is known to be lost.
        """
        spent = self.spent
        if not (spent.steps and spent.time_s > 0):
            return None
        return Goodput.of(spent, Counted(max(0.0, spent.steps - self.lost_steps), 0.0))

    @property
    def straggler(self) -> Straggler | None:
        """The worker that was slow in the last rounds, if there is one."""
        return find_straggler(self.step_times)

    @property
    def worker_bytes_sent(self) -> int:
        """Payload bytes sent by all ranks of the worker."""
        return self.bytes_sent + self.other_ranks_bytes_sent

    @property
    def worker_wait_s(self) -> float:
        """Seconds for which the worker was blocked, on the rank that has waited longest."""
        return max(self.wait_s, self.longest_wait_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that continue after a resume."""
        state = {"rounds": self.rounds, "bytes_sent": self.bytes_sent, "wait_s": self.wait_s}
        if self.bytes_saved:
            state["bytes_saved"] = self.bytes_saved
        spent = {name: getattr(self, name) for name in _SPENT}
        return {**state, "spent": {**spent, "saved_at": self._clock.wall_time()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters of a checkpoint; the time since then was away."""
        self.rounds = int(state["rounds"])
        self.bytes_sent = int(state["bytes_sent"])
        self.bytes_saved = int(state.get("bytes_saved", 0))
        self.wait_s = self.resumed_wait_s = float(state["wait_s"])
        if not (spent := state.get("spent")):  # of another worker: its time is not this one's
            return
        self.steps, self.lost_steps = int(spent["steps"]), float(spent["lost_steps"])
        # Clocks of two machines may differ.
        away_s = max(0.0, self._clock.wall_time() - float(spent["saved_at"]))
        self.join_s, self.away_s = float(spent["join_s"]), float(spent["away_s"]) + away_s
        self._began_s = self._clock.now() - float(spent["time_s"]) - away_s

    def record(self, kind: str, start_s: float, end_s: float) -> None:
        """Record an activity of this rank between two times of the clock, if that is recorded."""
        if self.spans is not None:
            self.spans.add(kind, start_s, end_s)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """A context in which this worker waits for the parameters of the run."""
        began_s, waited_s = self._clock.now(), self.wait_s
        yield
        self.join_s += self._clock.now() - began_s - (self.wait_s - waited_s)

    def count_wait(self, start_s: float, end_s: float) -> None:
        """Count the time for which this rank was blocked."""
        self.wait_s += end_s - start_s
        self.record("wait", start_s, end_s)

    def count_compressed(self, num_bytes: int, num_bytes_uncompressed: int) -> None:
        """Count a message that was sent in ``num_bytes``, because it was compressed."""
        self.bytes_sent += num_bytes
        self.bytes_saved += num_bytes_uncompressed - num_bytes
