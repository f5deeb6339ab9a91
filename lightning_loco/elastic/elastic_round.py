"""One exchange of a worker, from its begin to its end; the training thread waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_status import PendingStatuses, WorkerStatus
from lightning_loco.elastic.quorum import Commit, Plan
from lightning_loco.elastic.state_transfer import StateTransfer
from lightning_loco.engine.engine import Engine


class ElasticRound:
    """One exchange of this worker.

    Args:
        round_index: The round; :data:`~lightning_loco.elastic.quorum.NO_STATE` to join a run.
        status: What it tells the others.

    Attributes:
        values: Where the engine is as it begins, for newcomers.
        message: For the others; None if this worker only joins. Stays as it is until the end of the
            pending round, since the exchange may have to be repeated.
        stays: Whether local steps are made while it is under way.
        is_sent: Set it once the message is there, and the state will not change until the landing.
        received: What the messages have come to; None if the run has only begun.
        lost: What was lost of this worker's message on the wire, if it is fed back.
        bytes_sent: By this worker, for its message.
        bytes_saved: How much more that would have been without compression.
        statuses: Of all members, of shape ``(members, width)``.
        receipt: What was received, before all members have.
        plan: How it was carried in the end; None before that.
        state: The state of the run, if this worker needed it.
        is_adopted: Whether the engine goes on from it already.
        error: Why it was not carried.
        waited_since: When the training thread began to wait, by ``time.monotonic()``; None before.
    """

    def __init__(self, round_index: int, status: WorkerStatus) -> None:
        self.round_index = round_index
        self.status = status
        self.values: dict[str, Any] = {}
        self.message: Tensor | None = None
        self.is_overlapped = False
        self.is_sent = threading.Event()
        self.received: Tensor | None = None
        self.lost: Tensor | None = None
        self.bytes_sent = self.bytes_saved = 0
        self.statuses: Tensor | None = None
        self.commit: Commit | None = None
        self.plan: Plan | None = None
        self.state: StateTransfer | None = None
        self.is_adopted = False
        self.error: BaseException | None = None
        self.waited_since: float | None = None
        self._is_over = threading.Event()

    @property
    def has_drifted(self) -> bool:
        """Whether this worker got the state because its own was another one than the others'."""
        return self.plan is not None and self.plan.own in self.plan.drifted

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come."""
        self.error = error
        self._is_over.set()

    def is_over(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Wait for its end; raises what has gone wrong."""
        if self.waited_since is None:
            self.waited_since = time.monotonic()
        self._is_over.wait()
        if self.error is not None:
            raise self.error


class Carried:
    """A handle of what a pending round brings.

    Args:
        pending: It.
        engine: Whose message it carries.
        note: Is told of the pending round when it is over.
    """

    def __init__(
        self, pending: ElasticRound, engine: Engine, note: Callable[[ElasticRound], None]
    ) -> None:
        self.pending = pending
        self._engine = engine
        self._note = note

    @property
    def lost(self) -> Tensor | None:
        """What was lost of the message."""
        lost = self.pending.lost
        return None if lost is None else lost.to(self._engine.worker.replica.layout.device)

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self.pending.is_over()

    def wait(self) -> Tensor:
        """What the messages have come to."""
        statistics = self._engine.statistics
        with WaitTimer(statistics):
            self.pending.wait()
        self._note(self.pending)
        received = self.pending.received
        assert received is not None
        statistics.bytes_sent += self.pending.bytes_sent
        statistics.bytes_saved += self.pending.bytes_saved
        return received.to(self._engine.worker.replica.layout.device)

    def release(self) -> None:
        """The memory belongs to the pending round."""


def statuses_of(pending: ElasticRound, engine: Engine, place: str) -> PendingStatuses:
    """The statuses of all members, which come with a pending round."""

    def receive() -> Tensor:
        if not pending.is_sent.is_set():
            raise RuntimeError("Rows of members are known when the round is over.")
        with WaitTimer(engine.statistics):
            pending.wait()
        assert pending.statuses is not None
        return pending.statuses

    return PendingStatuses(receive, place, pending.is_over)
