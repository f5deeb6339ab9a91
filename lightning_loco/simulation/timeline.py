"""Events and costs of simulated workers, as plain values for tables and pictures."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from lightning_loco._util.goodput import SpentTime

Kind = Literal["compute", "wait", "join", "send", "away"]
"""Local steps; waiting for others or a link; waiting for the parameters of the run, at the start
or after a return; a message on its way; dead."""


class TimelineEvent(NamedTuple):
    """An event of a worker, with its start and end.

    Overlapped rounds send messages during local steps, so a ``"send"`` may overlap an event of
    another kind. Events of all other kinds follow each other.

    Attributes:
        worker: Index of the worker.
        kind: Kind of the event.
        start_s: Start of the event, in seconds from the start of the simulation.
        end_s: End of the event.
    """

    worker: int
    kind: Kind
    start_s: float
    end_s: float


class LossPoint(NamedTuple):
    """The training loss of a local step.

    Attributes:
        worker: Index of the worker.
        step: Local steps of that worker, this one included.
        time_s: When the step ended, in seconds from the start of the simulation.
        loss: The loss that ``local_step`` has returned.
    """

    worker: int
    step: int
    time_s: float
    loss: float


@dataclasses.dataclass(frozen=True)
class WorkerCosts:
    """Costs of one worker.

    Attributes:
        worker: Index of the worker.
        steps: Number of local steps.
        rounds: Number of rounds that it has begun.
        bytes_sent: Bytes of its messages; a ring all-reduce of B bytes counts as
            2 (N - 1) / N * B.
        time_s: Its time, in seconds from the start of the simulation.
        compute_s: Seconds in local steps.
        wait_s: Seconds of waiting for other workers or for a link.
        join_s: Seconds of waiting for the parameters of the run.
        away_s: Seconds for which it was dead.
    """

    worker: int
    steps: int
    rounds: int
    bytes_sent: int
    time_s: float
    compute_s: float
    wait_s: float
    join_s: float = 0.0
    away_s: float = 0.0

    @property
    def spent(self) -> SpentTime:
        """Its time, for :meth:`Goodput.of`."""
        return SpentTime(
            self.steps, self.time_s, self.compute_s, self.wait_s, self.join_s, self.away_s
        )

    @property
    def utilisation(self) -> float:
        """Share of the worker's time in local steps, from 0 to 1."""
        return self.compute_s / self.time_s if self.time_s else 0.0


class Timeline:
    """Records the events of all workers. Consecutive local steps are one event.

    Args:
        num_workers: Number of workers N.

    Attributes:
        events: The events, roughly in the order of their ends.
        losses: Losses of local steps, in the order of virtual time.
        seconds: Sum of the seconds of each worker, by kind.
    """

    def __init__(self, num_workers: int) -> None:
        self.events: list[TimelineEvent] = []
        self.losses: list[LossPoint] = []
        self.seconds: list[dict[Kind, float]] = [
            dict.fromkeys(get_args(Kind), 0.0) for _ in range(num_workers)
        ]
        self._open: dict[int, int] = {}

    def add(self, worker: int, kind: Kind, start_s: float, end_s: float) -> None:
        """Add an event, unless it took no time."""
        if not end_s > start_s:
            return
        self.seconds[worker][kind] += end_s - start_s
        last = self._open.get(worker) if kind == "compute" else None
        if last is not None and self.events[last].end_s == start_s:
            self.events[last] = self.events[last]._replace(end_s=end_s)
            return
        if kind == "compute":
            self._open[worker] = len(self.events)
        self.events.append(TimelineEvent(worker, kind, start_s, end_s))

    def add_loss(self, worker: int, step: int, time_s: float, value: Any) -> float | None:
        """Add the returned value of a local step if it is a loss; return the loss, or None."""
        if not (isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0)):
            return None
        loss = float(value)
        self.losses.append(LossPoint(worker, step, time_s, loss))
        return loss
