"""Graceful stop: after a request to any worker, all workers stop at the same local step."""

from __future__ import annotations

from fractions import Fraction

from lightning_loco.distributed.worker_group import WorkerGroup


class StopAgreed(Exception):
    """Raised at a sync point that the other workers will not reach, because they have stopped."""


class StopAgreement:
    """The training thread's side of the watchdogs' agreement on where to stop.

    This worker was asked to stop for the reason ``requested``, or None. ``agreed`` is the reason
    once it is at the agreed position.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.requested: str | None = None
        self.agreed: str | None = None

    def request(self, reason: str) -> None:
        """Ask all workers to stop; only sets attributes, so a signal handler may call it."""
        self.requested = reason
        if self._group.watchdog is not None:
            self._group.watchdog.stop_reason = reason

    @property
    def is_seen(self) -> bool:
        """Whether the watchdog knows that some worker was asked to stop."""
        watchdog = self._group.watchdog
        return watchdog is not None and watchdog.stop_seen

    def check(self, rounds: int, steps: int, sync_every: int) -> None:
        """Set :attr:`agreed` if some worker was asked to stop and this one is at the position.

        It has taken ``steps`` local steps since its last round, of ``sync_every`` in a round.
        RuntimeError, which names the worker, if one does not answer the request.
        """
        watchdog = self._group.watchdog
        if watchdog is None:
            self.agreed = self.requested
        elif watchdog.stop_seen:
            stop_at, reason = watchdog.wait_for_stop_point(self._group.timeout_s)
            if rounds + Fraction(steps + 1, sync_every) > stop_at:
                self.agreed = reason

    def postpone(self) -> None:
        """Go on to the next step or sync point, and stop there; others may have stopped already."""
        self.agreed = None

    def catch_up(self) -> bool:
        """Stop here, and return True, if all stop at a position that is never reached here.

        Another worker may know that position, and have stopped, a moment before this one does.
        """
        watchdog = self._group.watchdog
        if watchdog is None or not watchdog.stop_seen:
            return False
        _, self.agreed = watchdog.wait_for_stop_point(self._group.timeout_s)
        return True
