"""One exchange of a worker, from its begin to its end; the training thread waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_loco.distributed.work import Timed
from lightning_loco.distributed.worker_status import PendingRows, Row
from lightning_loco.elastic.quorum import Plan, Receipt
from lightning_loco.elastic.state_transfer import Handover
from lightning_loco.engine.engine import Engine


class Flight:
    """One exchange of this worker.

    Args:
        round_index: The round; :data:`~lightning_loco.elastic.quorum.UNKNOWING` to join a run.
        row: What it tells the others.

    Attributes:
        values: Where the engine is as it begins, for newcomers.
        message: For the others; None if this worker only joins. Stays as it is until the end of the
            flight, since the exchange may have to be repeated.
        stays: Whether local steps are made while it is under way.
        is_sent: Set it once the message is there, and the state will not change until the landing.
        received: What the messages have come to; None if the run has only begun.
        lost: What was lost of this worker's message on the wire, if it is fed back.
        bytes_sent: By this worker, for its message.
        bytes_saved: How much more that would have been without compression.
        rows: Of all members, of shape ``(members, width)``.
        receipt: What was received, before all members have.
        plan: How it was carried in the end; None before that.
        state: The state of the run, if this worker needed it.
        is_adopted: Whether the engine goes on from it already.
        error: Why it was not carried.
        waited_since: When the training thread began to wait, by ``time.monotonic()``; None before.
    """

    def __init__(self, round_index: int, row: Row) -> None:
        self.round_index = round_index
        self.row = row
        self.values: dict[str, Any] = {}
        self.message: Tensor | None = None
        self.stays = False
        self.is_sent = threading.Event()
        self.received: Tensor | None = None
        self.lost: Tensor | None = None
        self.bytes_sent = self.bytes_saved = 0
        self.rows: Tensor | None = None
        self.receipt: Receipt | None = None
        self.plan: Plan | None = None
        self.state: Handover | None = None
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
    """A handle of what a flight brings.

    Args:
        flight: It.
        engine: Whose message it carries.
        note: Is told of the flight when it is over.
    """

    def __init__(self, flight: Flight, engine: Engine, note: Callable[[Flight], None]) -> None:
        self.flight = flight
        self._engine = engine
        self._note = note

    @property
    def lost(self) -> Tensor | None:
        """What was lost of the message."""
        lost = self.flight.lost
        return None if lost is None else lost.to(self._engine.worker.replica.layout.device)

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self.flight.is_over()

    def wait(self) -> Tensor:
        """What the messages have come to."""
        statistics = self._engine.statistics
        with Timed(statistics):
            self.flight.wait()
        self._note(self.flight)
        received = self.flight.received
        assert received is not None
        statistics.bytes_sent += self.flight.bytes_sent
        statistics.bytes_saved += self.flight.bytes_saved
        return received.to(self._engine.worker.replica.layout.device)

    def release(self) -> None:
        """The memory belongs to the flight."""


def rows_of(flight: Flight, engine: Engine, place: str) -> PendingRows:
    """The rows of all members, which come with a flight."""

    def receive() -> Tensor:
        if not flight.is_sent.is_set():
            raise RuntimeError("Rows of members are known when the round is over.")
        with Timed(engine.statistics):
            flight.wait()
        assert flight.rows is not None
        return flight.rows

    return PendingRows(receive, place, flight.is_over)
