"""Stopping together: one request, one step at which all workers stop."""

from __future__ import annotations

from fractions import Fraction

from lightning_loco.distributed.worker_group import WorkerGroup


class StopAgreed(Exception):
    """Raised out of a sync point when the other workers have stopped, as agreed, somewhere else."""


class StopAgreement:
    """This worker's part in the agreement that the watchdogs make.

    Attributes:
        requested: Why this worker was asked to stop, or None.
        agreed: The reason to stop, once this worker is at the agreed step; None before.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.requested: str | None = None
        self.agreed: str | None = None

    def request(self, reason: str) -> None:
        """Ask all workers to stop; only leaves a note, so a signal handler may call it."""
        self.requested = reason
        if self._group.watchdog is not None:
            self._group.watchdog.stop_reason = reason

    def note(self, rounds: int, steps: int, sync_every: int | None) -> None:
        """See whether this worker is far enough, once some worker was asked to stop.

        After so many ``rounds`` it has made ``steps``, and ``sync_every`` per round; None if it may
        stop at any step, because nobody waits for it. A RuntimeError names who does not answer.
        """
        watchdog = self._group.watchdog
        if watchdog is None:
            self.agreed = self.requested
        elif watchdog.stop_seen:
            stop_at, reason = watchdog.wait_for_stop_point(self._group.timeout_s)
            if sync_every is None or rounds + Fraction(steps + 1, sync_every) > stop_at:
                self.agreed = reason

    def catch_up(self) -> bool:
        """Stop here, if the others have agreed on a step that this worker will not reach."""
        watchdog = self._group.watchdog
        if watchdog is None or watchdog.stop_at is None:
            return False
        self.agreed = watchdog.stop_at[1]
        return True
