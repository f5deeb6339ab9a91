"""The few numbers that every worker tells all others, so that all agree on what happens next.

A worker comes to an exchange of statuses either with a round to make or to wait at a *sync point*:
a place that all workers must reach together (validation, a checkpoint, the end of training). As
long as anyone has a round to make, those who wait take part in it. So no worker hangs when data is
uneven, and all see the same statuses.
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
from lightning_loco.distributed.work import ExplainErrors, WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup

IN_ROUND = 0.0
"""The ``sync_point`` of a worker that makes a round; sync points have a positive number."""


class WorkerStatus(NamedTuple):
    """What one worker tells all others; NaN stands for what it does not know.

    Attributes:
        sync_point: :data:`IN_ROUND`, or the number of a sync point.
        round_index: Rounds this worker has begun; equal on all workers.
        steps: Local steps since the last round.
        weight: Share in a mean: 1, or 0 for a worker without valid progress.
        finite: 0 when the parameters hold NaN or infinity.
        loss: Last training loss.
        spread: Squared distance to the mean in the round before.
        scalars: The algorithm's own numbers.
    """

    sync_point: float
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
        """Numbers in a status."""
        return len(cls._fields) - 1 + num_scalars


class PendingStatuses:
    """The statuses of all workers, under way.

    Args:
        receive: Waits and returns the table ``(N, width)``.
        label: Where this worker is, in words.
        has_arrived: Whether ``receive`` would return at once.

    Attributes:
        complete: Has all workers tell their statuses again, if one that had not looked at its
            parameters finds itself in a round; None if nobody needs to know.
    """

    def __init__(
        self,
        receive: Callable[[], Tensor],
        label: str,
        has_arrived: Callable[[], bool] = lambda: True,
    ) -> None:
        self._receive = receive
        self._label = label
        self._has_arrived = has_arrived
        self._statuses: list[WorkerStatus] | None = None
        self.complete: Callable[[], list[WorkerStatus]] | None = None

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses of all workers; a RuntimeError names who is missing or has failed."""
        if self._statuses is None:
            width = WorkerStatus.width(0)
            table = self._receive().tolist()
            statuses = [WorkerStatus(*v[:width])._replace(scalars=tuple(v[width:])) for v in table]
            for worker, status in enumerate(statuses):
                if status.round_index != statuses[0].round_index:
                    raise RuntimeError(
                        f"Worker {worker} is in round {status.round_index:.0f} and worker 0 in "
                        f"round {statuses[0].round_index:.0f}. Resume all workers from the same "
                        "checkpoint."
                    )
            makes_round = any(status.sync_point == IN_ROUND for status in statuses)
            if (
                self.complete
                and makes_round
                and any(math.isnan(status.weight) for status in statuses)
            ):
                statuses = self.complete()
            self._statuses = statuses
        return self._statuses

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._statuses is not None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._statuses is not None or self._has_arrived()

    def total_weight(self) -> float:
        """Sum of the workers' weights; waits for them. RuntimeError if it is zero."""
        total = sum(status.weight for status in self.wait())
        if total == 0:
            raise RuntimeError(
                f"No worker has made finite progress in {self._label}: the parameters hold NaN or "
                "infinity everywhere. Lower the learning rate, clip gradients, or look at the data."
            )
        return total


class StatusCarrier(Protocol):
    """How the statuses of a round travel: by themselves, or with its first bucket."""

    def sync_point(
        self, statistics: Statistics, status: WorkerStatus, label: str
    ) -> PendingStatuses | None:
        """Send the status at a sync point; None if there is a round to take part in."""

    def carry(self, statistics: Statistics, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send the status of a worker that takes part in a round."""


class SeparateStatuses:
    """Rows travel by themselves; those at a sync point learn from them whether there is a round."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def sync_point(
        self, statistics: Statistics, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Send this worker's status; all statuses tell whether there is a round."""
        return start_statuses(self._group, statistics, status, label)

    def carry(self, statistics: Statistics, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send this worker's status."""
        return start_statuses(self._group, statistics, status, label)


def sync_point_id(purpose: str) -> float:
    """The id of a sync point, from its purpose: equal on all workers, exact in float32."""
    return float(zlib.crc32(purpose.encode()) % (2**24 - 1) + 1)


def write_status(table: Tensor, worker: int, status: WorkerStatus) -> None:
    """Put one worker's status into a table ``(N, width)`` of zeros that will be summed."""
    table.zero_()
    table[worker] = torch.tensor(status.numbers, dtype=table.dtype)


def start_statuses(
    group: WorkerGroup, statistics: Statistics, status: WorkerStatus, label: str
) -> PendingStatuses:
    """Send this worker's status to all workers, by a small all-gather of its own.

    ``label`` says in words what the status is for: ``"round 12"``, ``"validation"``.
    """
    own = torch.tensor(status.numbers, dtype=torch.float64)
    if group.control is None:
        return PendingStatuses(lambda: own[None], label)
    table = own.new_empty(group.num_workers, len(own))
    group.announce_wait(label)
    with ExplainErrors(group, label):
        work = dist.all_gather(list(table), own, group=group.control, async_op=True)

    def receive() -> Tensor:
        with WaitTimer(statistics, group.clock), ExplainErrors(group, label):
            work.wait()
        return table

    return PendingStatuses(receive, label, work.is_completed)
