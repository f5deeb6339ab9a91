"""The status that every worker sends with a round or at a sync point, so that all agree.

A *sync point* is a place in the program that all workers must reach together: validation, a
checkpoint, the end of training. A worker that reaches one early takes part in the rounds of the
others until all are there, as with ``torch.distributed.algorithms.join``. So no worker waits
forever when data are uneven, and all see the same statuses.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import ExplainErrors, WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup

IN_ROUND = 0.0
"""The ``sync_point`` of a worker that makes a round."""


class WorkerStatus(NamedTuple):
    """What one worker sends to all others; NaN stands for what it does not know.

    Attributes:
        sync_point: Id of the sync point at which the worker waits, as :func:`sync_point_id` gives
            it; :data:`IN_ROUND` if it makes a round.
        round_index: Rounds that this worker has begun; equal on all workers.
        steps: Local steps since the last round.
        weight: Weight in a mean: 1, or 0 for a worker without valid progress.
        finite: 0 if the parameters hold NaN or infinity, else 1.
        loss: Last training loss.
        squared_distance: Squared distance to the mean of the round before.
        scalars: The algorithm's own numbers.
    """

    sync_point: float
    round_index: float
    steps: float
    weight: float = math.nan
    finite: float = math.nan
    loss: float = math.nan
    squared_distance: float = math.nan
    scalars: tuple[float, ...] = ()

    @property
    def numbers(self) -> list[float]:
        """All values in a fixed order."""
        return [*map(float, self[:-1]), *self.scalars]

    @classmethod
    def width(cls, num_scalars: int) -> int:
        """How many values a status has."""
        return len(cls._fields) - 1 + num_scalars


class PendingStatuses:
    """The statuses of all workers, which are being received.

    Args:
        receive: Waits and returns the table ``(N, width)``.
        label: What they are for, e.g. ``"round 12"``.
        has_arrived: Whether ``receive`` would return at once.
        resend: Exchanges the statuses once more. It is called if a worker at a sync point has to
            take part in a round: its first status had no weight, because it had not looked at its
            parameters. None if the weights are not needed.
    """

    def __init__(
        self,
        receive: Callable[[], Tensor],
        label: str,
        has_arrived: Callable[[], bool] = lambda: True,
        resend: Callable[[], PendingStatuses] | None = None,
    ) -> None:
        self._receive = receive
        self._label = label
        self._has_arrived = has_arrived
        self._resend = resend
        self._statuses: list[WorkerStatus] | None = None

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses of all workers.

        Raises:
            RuntimeError: If a worker is missing, has failed or is in another round; the message
                names it.
        """
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
            is_incomplete = any(math.isnan(status.weight) for status in statuses)
            if self._resend is not None and is_incomplete and is_round(statuses):
                statuses = self._resend().wait()
            self._statuses = statuses
        return self._statuses

    @classmethod
    def known(cls, statuses: Sequence[WorkerStatus] = (), label: str = "") -> PendingStatuses:
        """Statuses that have been received already."""
        pending = cls(lambda: torch.zeros(0, WorkerStatus.width(0)), label)
        pending._statuses = list(statuses)
        return pending

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


def is_round(statuses: list[WorkerStatus]) -> bool:
    """Whether a worker makes a round, in which those at a sync point must take part."""
    return any(status.sync_point == IN_ROUND for status in statuses)


def sync_point_id(purpose: str) -> float:
    """The id of a sync point, from its purpose: equal on all workers, exact in float32."""
    return float(zlib.crc32(purpose.encode()) % (2**24 - 1) + 1)


def write_status(table: Tensor, worker: int, status: WorkerStatus) -> None:
    """Write one worker's status into a table ``(N, width)`` of zeros that will be summed."""
    table.zero_()
    table[worker] = torch.tensor(status.numbers, dtype=table.dtype)


def send_status(
    group: WorkerGroup,
    statistics: Statistics,
    status: WorkerStatus,
    label: str,
    needs_weights: bool = False,
) -> PendingStatuses:
    """Send this worker's status to all workers, in a small all-gather of its own.

    Args:
        group: The workers.
        statistics: Where seconds are counted.
        status: Of this worker.
        label: What it is for: ``"round 12"``, ``"validation"``.
        needs_weights: Whether statuses without weight are to be exchanged again in a round.
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

    def resend() -> PendingStatuses:
        return send_status(group, statistics, status, label)

    return PendingStatuses(receive, label, work.is_completed, resend if needs_weights else None)
