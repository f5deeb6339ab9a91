"""Carries pending rounds of one worker, in a thread: who takes part, the exchange, again if it
fails.

Nothing here knows of engines. A pending round brings its message and its status; it ends with what
a carrier has made of the messages, and the statuses of all members. Whoever knows nothing, or is
behind, ends with the state of the run as well.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import queue
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from lightning_loco.background import BackgroundThread, begin
from lightning_loco.elastic.consistency import Consistency
from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.exchanges import Summing
from lightning_loco.elastic.gossip import Mixing
from lightning_loco.elastic.group import SILENT_S, Groups
from lightning_loco.elastic.lighthouse import Lighthouse, Member, Quorum
from lightning_loco.elastic.quorum import (
    NO_STATE,
    Commit,
    OtherRun,
    Plan,
    Told,
    difference,
    make_plan,
)
from lightning_loco.elastic.state_transfer import StateTransfer
from lightning_loco.engine.membership import DataShare

SAY_S = 10.0
"""Time between two lines that say what is waited for."""

UNREACHABLE_S = 3.0
"""After so long a line says that the lighthouse cannot be reached."""

LEAVING_S = 10.0
"""How long a worker that was asked to stop waits for the others to come to its round."""

_LOOK_S = 0.2

log = logging.getLogger(__name__)

_PAUSE_S, _PARTING_S = 0.2, 2.0

_ALONE = (
    " This worker is alone now and goes on from its own state. If it was this worker that was not "
    "heard, because it was stopped or cut off, the others have gone on without it, may have "
    "finished, and have other weights."
)

Copied = Future[StateTransfer | None]
"""The state for newcomers, copied beside the making of their group."""


class Asking:
    """Asks the lighthouse who takes part, for one pending round after the other.

    The call of torchft that asks does not come back before the members are together. It has a
    thread of its own, so that a worker that is asked to stop meanwhile can give it up.

    Args:
        lighthouse: Who is asked.
        living: Those who took part last and are alive, as far as this worker can see.
        is_stopping: Whether this worker was asked to stop; looked at while it waits.
        timeout_s: Longest wait of a pending round, in seconds, for what is said.

    Attributes:
        has_left: Whether this worker takes part no longer, and ends its pending rounds alone.
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
        self._pending: ElasticRound | None = None
        self._said_at = 0.0

    def ask(self, pending: ElasticRound, told: Told, waits: bool, wait_s: float) -> Quorum | None:
        """Who takes part; see :meth:`Lighthouse.quorum`.

        Where it ``waits``, a lighthouse that has come back is told of those whom it may not have
        heard of yet.

        A worker that was asked to stop waits for :data:`LEAVING_S` at most, and not at all for a
        lighthouse that cannot be reached. It then takes part no longer, and ends its pending
        rounds alone.
        """
        if self.has_left:
            return self._alone(told)

        def tell() -> dict[str, Any]:
            awaited = self._living() if waits and self._lighthouse.uptime.is_new(SILENT_S) else []
            return told._replace(awaited=awaited)._asdict()

        asking = begin(lambda: self._lighthouse.quorum(tell, wait_s), parting_s=0.0)
        try:
            while not wait([asking], _LOOK_S).done:
                if self._lighthouse.uptime.is_closed:
                    raise RuntimeError("This worker takes part no longer.")
                if self._gives_up():
                    self.has_left = True
                    self._lighthouse.close()
                    return self._alone(told)
                self._say(pending, lambda: self._what_is_missing(pending))
            return asking.result()
        finally:
            del asking  # a circle, from the error's frames back to the error

    def say_incomplete(self, pending: ElasticRound, plan: Plan) -> None:
        """Say, if it is time, that a plan has not enough members, or not all that are awaited."""
        names, missing = ", ".join(plan.names), ", ".join(plan.missing)
        late = f"{missing}: alive, but the restarted lighthouse has had no heartbeat of theirs yet"
        whom = late if missing else "more workers"
        there = f"{len(plan.names)} of at least {plan.enough} are there ({names})"
        self._say(pending, lambda: f"{_name(pending)} waits for {whom}. {there}")

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

    def _say(self, pending: ElasticRound, what: Callable[[], str]) -> None:
        """Say what a pending round waits for, if the training thread has waited for long enough."""
        now = time.monotonic()
        if pending.waited_since is None:
            return
        if pending is not self._pending:
            first_s = UNREACHABLE_S if self._lighthouse.trouble else SAY_S
            self._pending, self._said_at = pending, pending.waited_since + first_s - SAY_S
        if now - self._said_at < SAY_S:
            return
        self._said_at = now
        waited_s = now - pending.waited_since
        log.warning(
            "%s. It has waited for %.0f s, and ends with an error after %g s.",
            what(),
            waited_s,
            self._timeout_s,
        )

    def _what_is_missing(self, pending: ElasticRound) -> str:
        place, trouble = self._lighthouse.address, self._lighthouse.trouble
        if trouble:
            return (
                f"Cannot reach the lighthouse at {place} ({trouble}); start one there with "
                "`lightning-loco lighthouse`"
            )
        found = self._lighthouse.describe() or "its page in a browser shows who is alive"
        return f"{_name(pending)} waits for other workers. The lighthouse at {place}: {found}"


def _name(pending: ElasticRound) -> str:
    joins = pending.round_index <= NO_STATE
    return "This worker, which joins the run," if joins else f"Round {pending.round_index}"


class ElasticRounds(BackgroundThread):
    """Carries one pending round after the other.

    Args:
        lighthouse: Says who takes part.
        is_stopping: Whether this worker was asked to stop: it then waits for no more members than
            there are.
        groups: The open group.
        carrier: Carries the exchange in it.
        run: Settings and schema, for a comparison with the others'.
        share: Dealt out anew when the members change.
        min_workers: With fewer, pending rounds wait; those that have finished count as if they
        were there. timeout_s: Longest wait for enough members, in seconds.
        consistency: Compares the members' states.

    Attributes:
        are_last: Whether this worker leaves after them, and waits for no more members than there
            are.
        made: The group in which the last one was carried; empty if this worker has kept a state of
            its own.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        is_stopping: Callable[[], bool],
        groups: Groups,
        carrier: Summing | Mixing,
        run: dict[str, Any],
        *,
        share: DataShare,
        min_workers: int,
        timeout_s: float,
        consistency: Consistency,
    ) -> None:
        super().__init__("loco-rounds")
        self._lighthouse = lighthouse
        self._asking = Asking(lighthouse, groups.living, is_stopping, timeout_s)
        self._groups = groups
        self._carrier = carrier
        self._told = run
        text = json.dumps(run)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        groups.describe(text)
        self._share = share
        self._min_workers = min_workers
        self._timeout_s = timeout_s
        self._consistency = consistency
        self.are_last = False
        self.made = ""
        self._strangers: set[str] = set()
        self._members: tuple[str, ...] = ()
        self._seen_finished = 0
        self._queue: queue.SimpleQueue[ElasticRound | None] = queue.SimpleQueue()

    def carry(self, pending: ElasticRound) -> None:
        """Carry a pending round after those before it."""
        self._queue.put(pending)

    def leave(self, has_finished: bool) -> None:
        """Carry what is under way to its end, then take part no longer.

        Args:
            has_finished: Whether the others are to go on without waiting for someone else instead.
        """
        self.are_last = True
        self._queue.put(None)
        self.join(_PARTING_S)
        if self.is_alive():
            log.warning(
                "This worker leaves when its round under way is over: it waits for the others, "
                "for %g s at the most.",
                self._timeout_s,
            )
            self.join(self._timeout_s)
        if has_finished:
            self._groups.say_finished()
        self.close()

    def close(self) -> None:
        """Take part no longer; the others go on without the round that this worker waits for."""
        self._queue.put(None)
        self._lighthouse.close()
        self.join(_PARTING_S)
        self._groups.close()

    def end_with_process(self) -> float:
        """Take part no longer."""
        self._queue.put(None)
        self._lighthouse.close()
        return _PARTING_S

    def run(self) -> None:
        """Carry pending rounds until :meth:`close`."""
        while (pending := self._queue.get()) is not None:
            try:
                self._carry(pending)
            except BaseException as error:  # the training thread raises it
                pending.end(error)

    def _carry(self, pending: ElasticRound) -> None:
        began = time.monotonic()
        self._share.begin_round()
        while pending.plan is None:
            plan = self._agree(pending, began)
            commit, pending.commit = pending.commit, None
            if commit is not None and plan.own in plan.counted:
                self._count(pending, commit)
                continue
            self._name_lost(plan)
            if plan.is_new:
                self._share.deal(plan.data, plan.own, len(plan.names))
            copy = functools.partial(self._carrier.copy, pending, plan)
            copied = begin(copy) if plan.newcomers else None
            try:
                self._groups.open(plan)
                self._exchange(pending, plan, copied)
            except RuntimeError as error:
                self._groups.drop()
                if time.monotonic() - began > self._timeout_s:
                    raise
                text = str(error).partition("\n")[0]
                what = "is repeated" if pending.commit is None else "may count already"
                log.warning(
                    "Round %d %s, since a member was lost: %s", plan.round_index, what, text
                )

    def _agree(self, pending: ElasticRound, began: float) -> Plan:
        """Who takes part; waits until they are enough."""
        while True:
            is_last = self.are_last or self._asking.is_stopping()
            enough = 1 if is_last else self._min_workers - self._groups.finished
            told = Told(
                pending.round_index,
                self._groups.name,
                self._groups.address,
                self._share.reach,
                self._fingerprint,
                enough,
                self.made,
                received=[] if pending.commit is None else pending.commit.words,
                awaited=[],
            )
            left_s = began + self._timeout_s - time.monotonic()
            quorum = self._asking.ask(pending, told, not is_last, left_s) if left_s > 0 else None
            if quorum is None:
                raise RuntimeError(
                    f"Fewer than {self._min_workers} workers were there, or one that is alive did "
                    f"not come to round {pending.round_index}, for {self._timeout_s:g} s. The page "
                    "of the lighthouse (open its address in a browser) shows who is alive."
                )
            try:
                plan = make_plan(quorum, self._lighthouse.name)
            except OtherRun as other:
                raise ValueError(self._difference(other)) from None
            self._name_strangers(plan)
            is_complete = len(plan.names) >= plan.enough and not plan.missing
            if is_complete and (not plan.counted or plan.own in plan.counted):
                return plan
            if not is_complete:
                self._asking.say_incomplete(pending, plan)
            time.sleep(_PAUSE_S)

    def _name_lost(self, plan: Plan) -> None:
        """Warn of those who have taken part until now and do not any more, without a goodbye."""
        lost, self._members = set(self._members) - set(plan.names), plan.names
        if not lost or self._asking.has_left:
            return
        before, self._seen_finished = self._seen_finished, self._groups.finished
        if len(lost) <= self._seen_finished - before:
            return
        names = ", ".join(sorted(lost))
        log.warning(
            "Round %d goes on without %s: ended, or not heard by the lighthouse.%s",
            plan.round_index,
            names,
            _ALONE if len(plan.names) == 1 else "",
        )

    def _difference(self, other: OtherRun) -> str:
        theirs = self._groups.ask(other.store, other.who)
        try:
            return difference(self._told, dict(json.loads(theirs)), other.who)
        except (ValueError, TypeError):
            return f"This worker cannot join: its run is another one than that of {other.who}."

    def _name_strangers(self, plan: Plan) -> None:
        """Warn, once for each, of those whose words cannot be used."""
        for name in set(plan.strangers) - self._strangers:
            log.warning(
                "Ignored %.100r: it has asked the lighthouse to take part, but its request is "
                "malformed, or of another version of lightning_loco. The round goes on without it.",
                name,
            )
        self._strangers.update(plan.strangers)

    def _exchange(self, pending: ElasticRound, plan: Plan, copied: Copied | None) -> None:
        """Carry a pending round once; where it is over for the training thread, it has ended."""
        if self._consistency.is_due(plan):
            pending.is_sent.wait()
            plan = self._consistency.compare(plan, self._groups.gather)
        is_newcomer = plan.own in plan.newcomers
        if copied is None or plan.drifted:
            state = self._carrier.copy(pending, plan)
        else:
            state = copied.result()
        received, statuses = None, None
        if plan.round_index != NO_STATE:
            received, statuses = self._receive(pending, plan)
            self._groups.confirm()
        if is_newcomer:
            pending.state, for_newcomers = self._carrier.fetch(plan)
            received = received if for_newcomers is None else for_newcomers
        elif received is not None:
            received = self._carrier.settle(pending, received)
        self._end(pending, plan, received, statuses)
        if state is not None:
            self._carrier.bring(state, plan)

    def _receive(self, pending: ElasticRound, plan: Plan) -> tuple[Tensor | None, Tensor]:
        """What the messages come to, and the statuses of all members."""
        status = pending.status._replace(round_index=plan.round_index)
        if plan.own in plan.newcomers:
            status = status._replace(weight=0.0)
        statuses = self._groups.begin_gather(torch.tensor(status.numbers, dtype=torch.float64))
        received = self._carrier.exchange(pending, plan)
        commit = Commit(plan, received, statuses())
        if pending.round_index == plan.round_index:
            pending.commit = commit
        return commit.received, commit.statuses

    def _count(self, pending: ElasticRound, commit: Commit) -> None:
        """End with what was received; whoever needs the state as well asks again for it."""
        plan, received = commit.plan, commit.received
        if plan.own in plan.newcomers or received is None:
            return
        log.warning(
            "Round %d counts: all members that are left have received it.", plan.round_index
        )
        self._end(pending, plan, self._carrier.settle(pending, received), commit.statuses)

    def _end(
        self, pending: ElasticRound, plan: Plan, received: Tensor | None, statuses: Tensor | None
    ) -> None:
        pending.received, pending.statuses, pending.plan = received, statuses, plan
        pending.commit, self.made = None, plan.group
        pending.end()
