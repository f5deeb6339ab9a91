"""The status that every worker sends with a round or at a sync point, so that all agree.

A *sync point* is a place in the program that all workers must reach together: validation, a
checkpoint, the end of training. A worker that reaches one early takes part in the rounds of the
others until all are there, as with ``torch.distributed.algorithms.join``. So no worker waits
forever when data are uneven, and all see the same statuses.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup

IN_ROUND = 0.0
"""The ``sync_point`` of a worker that runs a round."""


class WorkerStatus(NamedTuple):
    """The numbers that one worker sends to all others; NaN stands for unknown ones.

    Attributes:
        sync_point: Id of the sync point at which the worker waits, as :func:`sync_point_id` gives
            it; :data:`IN_ROUND` if it runs a round.
        round_index: Rounds that this worker has begun; equal on all workers.
        steps: Local steps since the last round.
        weight: Weight in a mean: 1, or 0 for a worker without valid progress.
        finite: 0 if the parameters hold NaN or infinity, else 1.
        loss: Last training loss.
        squared_distance: Squared distance to the mean of the round before.
        step_s: Seconds of a local step since the last round, without waiting; 0 if unknown.
        scalars: The algorithm's own numbers.
    """

    sync_point: float
    round_index: float
    steps: float
    weight: float = math.nan
    finite: float = math.nan
    loss: float = math.nan
    squared_distance: float = math.nan
    step_s: float = 0.0
    scalars: tuple[float, ...] = ()

    @property
    def numbers(self) -> list[float]:
        """All values in a fixed order."""
        return [*map(float, self[:-1]), *self.scalars]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> WorkerStatus:
        """The status with these :attr:`numbers`."""
        width = cls.width(0)
        return cls(*numbers[:width])._replace(scalars=tuple(numbers[width:]))  # type: ignore[arg-type]

    @classmethod
    def width(cls, num_scalars: int) -> int:
        """How many values a status has."""
        return len(cls._fields) - 1 + num_scalars


class PendingStatuses(Protocol):
    """The statuses of all workers, which are being received.

    Attributes:
        label: Their purpose, e.g. ``"round 12"``.
    """

    label: str

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once; never waits."""

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses of all workers, in order.

        RuntimeError, which names it, if a worker is missing, has failed or is in another round.
        """


@dataclasses.dataclass
class KnownStatuses:
    """Statuses that have been received already."""

    statuses: Sequence[WorkerStatus] = ()
    label: str = ""
    has_been_read: bool = True

    def has_arrived(self) -> bool:
        """True."""
        return True

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses."""
        return list(self.statuses)


class GatheredStatuses:
    """Statuses in a separate all-gather, to which this worker's is sent at once.

    With ``needs_weights`` they are gathered again if a worker at a sync point has sent no weight to
    a round, because it had not read its parameters.
    """

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        status: WorkerStatus,
        label: str,
        needs_weights: bool = False,
    ) -> None:
        self.label = label
        self._group = group
        self._statistics = statistics
        self._status = status
        self._needs_weights = needs_weights
        self._statuses: list[WorkerStatus] | None = None
        self._work: dist.Work | None = None
        own = torch.tensor(status.numbers, dtype=torch.float64, device="cpu")
        self._table = own.new_empty(group.num_workers, len(own))
        if group.control is None:
            self._table[0] = own
            return
        group.announce_wait(label)
        with ExplainErrors(group, label):
            rows = list(self._table)
            self._work = dist.all_gather(rows, own, group=group.control, async_op=True)

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._statuses is not None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> list[WorkerStatus]:
        """Return the statuses; RuntimeError as in :meth:`PendingStatuses.wait`."""
        if self._statuses is None:
            if self._work is not None:
                timer = WaitTimer(self._statistics, self._group.clock)
                with timer, ExplainErrors(self._group, self.label):
                    self._work.wait()
            statuses = statuses_in(self._table)
            is_incomplete = any(math.isnan(status.weight) for status in statuses)
            if self._needs_weights and is_incomplete and is_round(statuses):
                again = self._group, self._statistics, self._status, self.label
                statuses = GatheredStatuses(*again).wait()
            self._statuses = statuses
        return self._statuses


def statuses_in(table: Tensor) -> list[WorkerStatus]:
    """Read a table ``(N, width)``; RuntimeError if the workers are in different rounds."""
    statuses = [WorkerStatus.of(numbers) for numbers in table.tolist()]
    for worker, status in enumerate(statuses):
        if status.round_index != statuses[0].round_index:
            raise RuntimeError(
                f"Worker {worker} is in round {status.round_index:.0f} and worker 0 in round "
                f"{statuses[0].round_index:.0f}. Resume all workers from the same checkpoint."
            )
    return statuses


def total_weight(weights: Sequence[float], label: str) -> float:
    """Return the sum of the workers' weights; RuntimeError if it is zero."""
    total = sum(weights)
    if total == 0:
        raise RuntimeError(
            f"No worker has made finite progress in {label}: the parameters hold NaN or infinity "
            "everywhere. Lower the learning rate, clip gradients, or look at the data."
        )
    return total


def is_round(statuses: list[WorkerStatus]) -> bool:
    """Whether a worker runs a round, in which workers at a sync point must take part."""
    return any(status.sync_point == IN_ROUND for status in statuses)


def sync_point_id(purpose: str) -> float:
    """The id of a sync point, from its purpose: equal on all workers, exact in float32."""
    return float(zlib.crc32(purpose.encode()) % (2**24 - 1) + 1)


def write_status(table: Tensor, worker: int, status: WorkerStatus) -> None:
    """Write one worker's status into a table ``(N, width)`` of zeros that will be summed."""
    table.zero_()
    table[worker] = torch.tensor(status.numbers, dtype=table.dtype, device="cpu")
