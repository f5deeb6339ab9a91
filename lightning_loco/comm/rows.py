"""The few numbers that travel beside every round, so that all workers agree on what happens next.

A worker comes to the control exchange either with a round to make or to wait at a *meeting*: a
place that all workers must reach together (validation, a checkpoint, the end of training). As long
as anyone has a round to make, those who wait take part in it. So no worker hangs when data is
uneven, and all see the same rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed

ROUND = 0.0
"""The ``place`` of a worker that makes a round; meetings have a positive number."""


class Row(NamedTuple):
    """What one worker tells all others.

    Attributes:
        place: :data:`ROUND`, or the number of a meeting.
        round_index: Rounds this worker has begun; equal on all workers.
        steps: Local steps since the last round.
        weight: Share in a mean: 1, or 0 for a worker without valid progress.
        finite: 0 when the parameters hold NaN or infinity.
        loss: Last training loss, NaN if unknown.
        spread: Squared distance to the mean in the round before, NaN if unknown.
    """

    place: float
    round_index: float
    steps: float
    weight: float
    finite: float
    loss: float
    spread: float


def meeting_number(purpose: str) -> float:
    """A number that stands for the purpose of a meeting, equal on all workers, exact in float32."""
    return float(zlib.crc32(purpose.encode()) % (2**24 - 1) + 1)


def write_row(table: Tensor, worker: int, row: Row) -> None:
    """Put one worker's row into a table ``(N, len(row))`` of zeros that will be summed."""
    values = [0.0] * table.numel()
    values[worker * len(row) : (worker + 1) * len(row)] = row
    table.copy_(torch.tensor(values, dtype=table.dtype).view(table.shape))


class PendingRows:
    """The rows of all workers, under way.

    Args:
        receive: Waits and returns the table ``(N, len(Row._fields))``.
        place: Where this worker is, in words.
    """

    def __init__(self, receive: Callable[[], Tensor], place: str) -> None:
        self._receive = receive
        self._place = place
        self._rows: list[Row] | None = None

    def wait(self) -> list[Row]:
        """Return the rows of all workers.

        Raises:
            RuntimeError: If a worker is missing or has failed; the message names it.
        """
        if self._rows is None:
            rows = [Row(*values) for values in self._receive().tolist()]
            for worker, row in enumerate(rows):
                if row.round_index != rows[0].round_index:
                    raise RuntimeError(
                        f"Worker {worker} is in round {row.round_index:.0f} and worker 0 in round "
                        f"{rows[0].round_index:.0f}. Resume all workers from the same checkpoint."
                    )
            self._rows = rows
        return self._rows

    @property
    def arrived(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._rows is not None

    def total_weight(self) -> float:
        """Sum of the workers' weights; waits for them.

        Raises:
            RuntimeError: If no worker has a valid message.
        """
        total = sum(row.weight for row in self.wait())
        if total == 0:
            raise RuntimeError(
                f"No worker has made finite progress in {self._place}: the parameters hold NaN or "
                "infinity everywhere. Lower the learning rate, clip gradients, or look at the data."
            )
        return total


def start_rows(group: WorkerGroup, statistics: Statistics, row: Row, place: str) -> PendingRows:
    """Send this worker's row to all workers, by a small all-reduce of its own.

    Args:
        group: The workers.
        statistics: Where the waiting is counted.
        row: What to tell.
        place: The same in words, for messages: ``"round 12"``, ``"validation"``.
    """
    table = torch.empty(group.num_workers, len(row), dtype=torch.float64)
    write_row(table, group.worker, row)
    if group.control is None:
        return PendingRows(lambda: table, place)
    announce_place(group, place)
    with Explained(group, place):
        work = dist.all_reduce(table, group=group.control, async_op=True)

    def receive() -> Tensor:
        with Timed(statistics), Explained(group, place):
            work.wait()
        return table

    return PendingRows(receive, place)


def announce_place(group: WorkerGroup, place: str) -> None:
    """Note in the watchdog where this worker is about to wait for the others."""
    if group.watchdog is not None:
        group.watchdog.place = place
        group.watchdog.meetings += 1
