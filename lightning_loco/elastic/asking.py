"""Asks the lighthouse who takes part, beside a thread that says what is waited for.

The call of torchft that asks does not come back before the members are together. It has a thread of
its own, so that a worker that is asked to stop meanwhile can give it up.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from lightning_loco.background import begin
from lightning_loco.elastic.flight import Flight
from lightning_loco.elastic.gathering import SILENT_S
from lightning_loco.elastic.lighthouse import Lighthouse, Member, Quorum
from lightning_loco.elastic.plan import UNKNOWING, Plan, Told

SAY_S = 10.0
"""Time between two lines that say what is waited for."""

UNREACHABLE_S = 3.0
"""After so long a line says that the lighthouse cannot be reached."""

LEAVING_S = 10.0
"""How long a worker that was asked to stop waits for the others to come to its round."""

_LOOK_S = 0.2

log = logging.getLogger(__name__)


class Asking:
    """Asks for one flight after the other.

    Args:
        lighthouse: Who is asked.
        living: Those who took part last and are alive, as far as this worker can see.
        is_stopping: Whether this worker was asked to stop; looked at while it waits.
        timeout_s: Longest wait of a flight, in seconds, for what is said.

    Attributes:
        has_left: Whether this worker takes part no longer, and ends its flights alone.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        living: Callable[[], list[str]],
        is_stopping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._lighthouse = lighthouse
        self._living = living
        self._timeout_s = timeout_s
        self.is_stopping = is_stopping
        self._stopping_since: float | None = None
        self.has_left = False
        self._flight: Flight | None = None
        self._said_at = 0.0

    def ask(self, flight: Flight, told: Told, waits: bool, wait_s: float) -> Quorum | None:
        """Who takes part; see :meth:`Lighthouse.quorum`.

        Where it ``waits``, a lighthouse that has come back is told of those whom it may not have
        heard of yet.

        A worker that was asked to stop waits for :data:`LEAVING_S` at most, and not at all for a
        lighthouse that cannot be reached. It then takes part no longer, and ends its flights alone.
        """
        if self.has_left:
            return self._alone(told)

        def tell() -> dict[str, Any]:
            awaited = self._living() if waits and self._lighthouse.is_new(SILENT_S) else []
            return told._replace(awaited=awaited)._asdict()

        asking = begin(lambda: self._lighthouse.quorum(tell, wait_s), parting_s=0.0)
        try:
            while not wait([asking], _LOOK_S).done:
                if self._lighthouse.is_closed:
                    raise RuntimeError("This worker takes part no longer.")
                if self._gives_up():
                    self.has_left = True
                    self._lighthouse.close()
                    return self._alone(told)
                self._say(flight, lambda: self._what_is_missing(flight))
            return asking.result()
        finally:
            del asking  # a circle, from the error's frames back to the error

    def say_incomplete(self, flight: Flight, plan: Plan) -> None:
        """Say, if it is time, that a plan has not enough members, or not all that are awaited."""
        names, missing = ", ".join(plan.names), ", ".join(plan.missing)
        late = f"{missing}: alive, but the restarted lighthouse has had no heartbeat of theirs yet"
        whom = late if missing else "more workers"
        there = f"{len(plan.names)} of at least {plan.enough} are there ({names})"
        self._say(flight, lambda: f"{_name(flight)} waits for {whom}. {there}")

    def _alone(self, told: Told) -> Quorum:
        """This worker, and no other."""
        words = told._replace(enough=1)._asdict()
        return Quorum(secrets.token_hex(8), [Member(self._lighthouse.name, words)])

    def _gives_up(self) -> bool:
        if not self.is_stopping():
            return False
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
        if not self._lighthouse.trouble and now - self._stopping_since < LEAVING_S:
            return False
        log.warning(
            "This worker was asked to stop: it waits no longer for the others, and ends its round "
            "alone."
        )
        return True

    def _say(self, flight: Flight, what: Callable[[], str]) -> None:
        """Say what a flight waits for, if the training thread has waited for long enough."""
        now = time.monotonic()
        if flight.waited_since is None:
            return
        if flight is not self._flight:
            first_s = UNREACHABLE_S if self._lighthouse.trouble else SAY_S
            self._flight, self._said_at = flight, flight.waited_since + first_s - SAY_S
        if now - self._said_at < SAY_S:
            return
        self._said_at = now
        waited_s = now - flight.waited_since
        log.warning(
            "%s. It has waited for %.0f s, and ends with an error after %g s.",
            what(),
            waited_s,
            self._timeout_s,
        )

    def _what_is_missing(self, flight: Flight) -> str:
        place, trouble = self._lighthouse.address, self._lighthouse.trouble
        if trouble:
            return (
                f"Cannot reach the lighthouse at {place} ({trouble}); start one there with "
                "`lightning-loco lighthouse`"
            )
        found = self._lighthouse.describe() or "its page in a browser shows who is alive"
        return f"{_name(flight)} waits for other workers. The lighthouse at {place}: {found}"


def _name(flight: Flight) -> str:
    joins = flight.round_index <= UNKNOWING
    return "This worker, which joins the run," if joins else f"Round {flight.round_index}"
