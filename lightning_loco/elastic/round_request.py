"""What an engine asks the round thread for, and what it gets back."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.elastic.quorum import NO_STATE, QuorumPlan
from lightning_loco.elastic.recovery import RunState


@dataclasses.dataclass(frozen=True, eq=False)
class RoundRequest:
    """A round that is to be run.

    Attributes:
        round_index: The round; ``NO_STATE``, or a ``resumed_round``, to join a run.
        status: This worker's status.
        position: Position of the engine at the start of the round, for joining workers.
        message: This worker's message; None if it only joins. Must stay unchanged until the round
            is done, since the exchange may have to be repeated.
        is_overlapped: Whether the training thread takes local steps meanwhile.
    """

    round_index: int
    status: WorkerStatus
    position: dict[str, Any]
    message: Tensor | None = None
    is_overlapped: bool = False

    def __str__(self) -> str:
        """Its name in messages."""
        if self.round_index <= NO_STATE:
            return "This worker, which joins the run,"
        return f"Round {self.round_index}"


@dataclasses.dataclass(frozen=True, eq=False)
class RoundResult:
    """What an exchange has brought.

    Attributes:
        plan: The plan of the exchange that succeeded.
        received: Sum of the messages; None if the run has only begun.
        statuses: Statuses of all members, of shape ``(members, width)``; None likewise.
        residual: What compression removed from the message, if there is error feedback.
        bytes_sent: Bytes of messages that this worker sent.
        bytes_saved: Bytes that it would have sent in addition without compression.
        data_start: Where to continue in the stream of samples, as arguments of
            :meth:`DataShard.reassign`; None if the members are the same as before.
        state: State of the run, if this worker needed it.
    """

    plan: QuorumPlan
    received: Tensor | None = None
    statuses: Tensor | None = None
    residual: Tensor | None = None
    bytes_sent: int = 0
    bytes_saved: int = 0
    data_start: tuple[int, int, int] | None = None
    state: RunState | None = None


class PendingRound(Future[RoundResult]):
    """A round that was asked for, and its result once it is done.

    Args:
        request: The round.
        clock: Only read.

    Attributes:
        request: The round.
        waited_since: When the training thread began to wait, by the clock.
    """

    def __init__(self, request: RoundRequest, clock: Clock = REAL_CLOCK) -> None:
        super().__init__()
        self._clock = clock
        self.request = request
        self.waited_since: float | None = None

    def wait(self) -> RoundResult:
        """Wait until the round is done, for as long as the round thread tries; raise its error."""
        if self.waited_since is None:
            self.waited_since = self._clock.now()
        return self.result()
