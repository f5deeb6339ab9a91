"""The interface of exchanges, which move the messages and the statuses of all workers.

Every exchange has two faces that must agree: ``start(...).wait()`` between processes, and
``simulate(...)`` on the list of all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import GatheredStatuses, PendingStatuses, WorkerStatus
from lightning_loco.engine.buckets import Bucket


class Handle(Protocol):
    """The exchange of one bucket that has been started, like ``torch.distributed.Work``."""

    @property
    def lost(self) -> Tensor | None:
        """After :meth:`wait`: the loss of the own message; None if it is not fed back."""

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return at once; never waits."""

    def wait(self) -> Tensor:
        """Return the received message, perhaps in the memory of the sent one.

        Called once, and by statuses behind the message. RuntimeError, which names it, if a worker
        is missing or has failed.
        """

    def release(self) -> None:
        """Let the memory of the received message be used again."""


class Arrived(NamedTuple):
    """A handle whose wait is over."""

    received: Tensor
    lost: Tensor | None = None

    def has_arrived(self) -> bool:
        """True."""
        return True

    def wait(self) -> Tensor:
        """Return the received message."""
        return self.received

    def release(self) -> None:
        """Do nothing: the memory belongs to the caller."""


class Exchange(Protocol):
    """One way to move messages.

    Attributes:
        is_weighted: Whether messages have weights, and workers of weight 0 send zeros: what is
            received is a weighted sum, to be divided by the total weight; or the weighted mean, if
            the codec averages senders; or the messages of all as they are.
        carries_status: Whether statuses travel behind the message of a round's first bucket.
    """

    is_weighted: bool
    carries_status: bool

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> Handle:
        """Send a bucket; its memory must stay untouched until :meth:`Handle.wait` has returned.

        ``weight`` is this worker's. It is ignored unless :attr:`is_weighted`.
        """

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Return the received message of each worker, given all messages in order.

        Their loss is left in the messages' memory, if it is fed back. Without ``weights`` all
        are 1.
        """

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Write the status behind a message that is sent next. Only if :attr:`carries_status`."""

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Return the statuses behind a message that was sent. Only if :attr:`carries_status`."""

    def send_status(self, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send the status of a worker in a round by itself, if the message does not carry it."""

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Wait at a sync point until all workers have sent their status.

        Returns:
            The statuses; None if a worker runs a round that carries them.
        """


class SeparateStatuses:
    """Statuses of all workers in a separate all-gather.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
    """

    is_weighted = False
    carries_status = False

    def __init__(self, group: WorkerGroup, statistics: Statistics) -> None:
        self._group = group
        self._statistics = statistics

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Raise RuntimeError: messages carry no status."""
        raise RuntimeError(f"{type(self).__name__} sends statuses by themselves.")

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Raise RuntimeError: messages carry no status."""
        raise RuntimeError(f"{type(self).__name__} sends statuses by themselves.")

    def send_status(self, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send this worker's status."""
        return GatheredStatuses(self._group, self._statistics, status, label, self.is_weighted)

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Send this worker's status and wait for all."""
        return GatheredStatuses(self._group, self._statistics, status, label).wait()
