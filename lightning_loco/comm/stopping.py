"""Stopping together: one request, one step at which all workers stop."""

from __future__ import annotations

from fractions import Fraction

from lightning_loco.comm.groups import WorkerGroup


class StopAgreement:
    """This worker's part in the agreement that the watchdogs make.

    Args:
        group: The workers.

    Attributes:
        agreed: The reason to stop, once this worker is at the agreed step; None before.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._requested: str | None = None
        self.agreed: str | None = None

    def request(self, reason: str) -> None:
        """Ask all workers to stop; only leaves a note, so a signal handler may call it."""
        self._requested = reason
        if self._group.watchdog is not None:
            self._group.watchdog.stop_reason = reason

    def note(self, rounds: int, steps: int, sync_every: int) -> None:
        """Tell the watchdog how far this worker is, and see whether it is far enough.

        Args:
            rounds: Rounds made.
            steps: Local steps since the last round.
            sync_every: Local steps of this worker per round.

        Raises:
            RuntimeError: If a worker does not say where it can stop.
        """
        watchdog = self._group.watchdog
        if watchdog is None:
            self.agreed = self._requested
            return
        watchdog.progress = (rounds, steps, sync_every)
        if watchdog.stop_seen:
            stop_at, reason = watchdog.wait_for_stop_point(self._group.timeout_s)
            if rounds + Fraction(steps + 1, sync_every) > stop_at:
                self.agreed = reason

    def note_anywhere(self) -> None:
        """Like :meth:`note`, where a worker may stop at any step, because nobody waits for it.

        Raises:
            RuntimeError: If a worker does not say that it has heard of the stop.
        """
        watchdog = self._group.watchdog
        if watchdog is None:
            self.agreed = self._requested
        elif watchdog.stop_seen:
            self.agreed = watchdog.wait_for_stop_point(self._group.timeout_s)[1]

    def catch_up(self) -> bool:
        """Stop here, if the others have agreed on a step that this worker will not reach."""
        watchdog = self._group.watchdog
        if watchdog is None or watchdog.stop_at is None:
            return False
        self.agreed = watchdog.stop_at[1]
        return True
