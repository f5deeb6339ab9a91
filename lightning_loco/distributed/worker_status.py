"""The few numbers that every worker tells all others, so that all agree on what happens next.

A worker comes to an exchange of rows either with a round to make or to wait at a *meeting*: a
place that all workers must reach together (validation, a checkpoint, the end of training). As long
as anyone has a round to make, those who wait take part in it. So no worker hangs when data is
uneven, and all see the same rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import Explained, Timed
from lightning_loco.distributed.worker_group import WorkerGroup

ROUND = 0.0
"""The ``place`` of a worker that makes a round; meetings have a positive number."""


class Row(NamedTuple):
    """What one worker tells all others; NaN stands for what it does not know.

    Attributes:
        place: :data:`ROUND`, or the number of a meeting.
        round_index: Rounds this worker has begun; equal on all workers.
        steps: Local steps since the last round.
        weight: Share in a mean: 1, or 0 for a worker without valid progress.
        finite: 0 when the parameters hold NaN or infinity.
        loss: Last training loss.
        spread: Squared distance to the mean in the round before.
        scalars: The algorithm's own numbers.
    """

    place: float
    round_index: float
    steps: float
    weight: float = math.nan
    finite: float = math.nan
    loss: float = math.nan
    spread: float = math.nan
    scalars: tuple[float, ...] = ()

    @property
    def numbers(self) -> list[float]:
        """All of it, in a fixed order."""
        return [*map(float, self[:-1]), *self.scalars]

    @classmethod
    def width(cls, num_scalars: int) -> int:
        """Numbers in a row."""
        return len(cls._fields) - 1 + num_scalars


class PendingRows:
    """The rows of all workers, under way.

    Args:
        receive: Waits and returns the table ``(N, width)``.
        place: Where this worker is, in words.
        has_arrived: Whether ``receive`` would return at once.

    Attributes:
        complete: Has all workers tell their rows again, if one that had not looked at its
            parameters finds itself in a round; None if nobody needs to know.
    """

    def __init__(
        self,
        receive: Callable[[], Tensor],
        place: str,
        has_arrived: Callable[[], bool] = lambda: True,
    ) -> None:
        self._receive = receive
        self._place = place
        self._has_arrived = has_arrived
        self._rows: list[Row] | None = None
        self.complete: Callable[[], list[Row]] | None = None

    def wait(self) -> list[Row]:
        """Return the rows of all workers; a RuntimeError names who is missing or has failed."""
        if self._rows is None:
            width = Row.width(0)
            table = self._receive().tolist()
            rows = [Row(*v[:width])._replace(scalars=tuple(v[width:])) for v in table]
            for worker, row in enumerate(rows):
                if row.round_index != rows[0].round_index:
                    raise RuntimeError(
                        f"Worker {worker} is in round {row.round_index:.0f} and worker 0 in round "
                        f"{rows[0].round_index:.0f}. Resume all workers from the same checkpoint."
                    )
            makes_round = any(row.place == ROUND for row in rows)
            if self.complete and makes_round and any(math.isnan(row.weight) for row in rows):
                rows = self.complete()
            self._rows = rows
        return self._rows

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._rows is not None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._rows is not None or self._has_arrived()

    def total_weight(self) -> float:
        """Sum of the workers' weights; waits for them. RuntimeError if it is zero."""
        total = sum(row.weight for row in self.wait())
        if total == 0:
            raise RuntimeError(
                f"No worker has made finite progress in {self._place}: the parameters hold NaN or "
                "infinity everywhere. Lower the learning rate, clip gradients, or look at the data."
            )
        return total


class RowCarrier(Protocol):
    """How the rows of a round travel: by themselves, or with its first parcel."""

    def meet(self, statistics: Statistics, row: Row, place: str) -> PendingRows | None:
        """Tell the row at a meeting; None if it is known that there is a round to take part in."""

    def carry(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Send the row of a worker that takes part in a round."""


class TravellingRows:
    """Rows travel by themselves; those at a meeting learn from them whether there is a round."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def meet(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Send this worker's row; whether there is a round is known when all rows are here."""
        return start_rows(self._group, statistics, row, place)

    def carry(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Send this worker's row."""
        return start_rows(self._group, statistics, row, place)


def meeting_number(purpose: str) -> float:
    """A number that stands for the purpose of a meeting, equal on all workers, exact in float32."""
    return float(zlib.crc32(purpose.encode()) % (2**24 - 1) + 1)


def write_row(table: Tensor, worker: int, row: Row) -> None:
    """Put one worker's row into a table ``(N, width)`` of zeros that will be summed."""
    table.zero_()
    table[worker] = torch.tensor(row.numbers, dtype=table.dtype)


def start_rows(group: WorkerGroup, statistics: Statistics, row: Row, place: str) -> PendingRows:
    """Send this worker's row to all workers, by a small all-gather of its own.

    ``place`` says in words what the row is for: ``"round 12"``, ``"validation"``.
    """
    own = torch.tensor(row.numbers, dtype=torch.float64)
    if group.control is None:
        return PendingRows(lambda: own[None], place)
    table = own.new_empty(group.num_workers, len(own))
    group.come_to(place)
    with Explained(group, place):
        work = dist.all_gather(list(table), own, group=group.control, async_op=True)

    def receive() -> Tensor:
        with Timed(statistics, group.clock), Explained(group, place):
            work.wait()
        return table

    return PendingRows(receive, place, work.is_completed)
