"""What a member decides in a round: its partners, which messages count, and when it gives up.

There are no sockets and no threads here, and time is what the clock says. The threads in
:mod:`lightning_loco.elastic.rounds` do the actions (:mod:`lightning_loco._util.decisions`).
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

from lightning_loco._util import decisions
from lightning_loco._util.clock import Clock
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.elastic.quorum import (
    NO_STATE,
    Member,
    MemberInfo,
    OtherRun,
    Quorum,
    QuorumPlan,
    make_plan,
)
from lightning_loco.elastic.round_request import PendingRound, RoundResult

T = TypeVar("T")

WARN_EVERY_S = 10.0
"""Time between two warnings about what a round waits for."""

WARN_UNREACHABLE_S = 3.0
"""Time until the first warning if the lighthouse cannot be reached."""

STOP_WAIT_S = 10.0
"""How long a worker that was asked to stop waits for the others to start its round."""

_RETRY_S = 0.2

_ALONE = (
    " This worker is alone now and continues from its own state. If the lighthouse received no "
    "heartbeats from this worker, because it was stopped or cut off, the others have continued "
    "without it and may have finished with different weights."
)

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- actions and their outcomes


class Do(enum.Enum):
    """What a member does in a round; an action is one of these with its argument.

    Attributes:
        ASK: Let the first rank of the worker run :meth:`RoundDecisions.ask`, with what this worker
            has received, and when the round began: a :class:`Quorum`.
        DESCRIBE: Ask a member of an :class:`OtherRun` how that differs: a text.
        PAUSE: Wait for some seconds.
        OPEN: Open the group of a plan.
        COMPARE: Compare the states of all members: a plan in which those that have drifted join.
        COPY: Copy the own state for the joining members of a plan.
        EXCHANGE: Exchange messages and statuses: a :class:`RoundResult`, not confirmed yet.
        CONFIRM: Confirm to all members that everything was received; wait until all have done so.
        RECEIVE: Receive the state of the run: a :class:`RunState`.
        FINISH: Give the training thread a :class:`RoundResult`.
        SEND: Send the state that was copied to the joining members of a plan.
        LEAVE_GROUP: Leave the open group, also if the others are still in an exchange.
        REQUEST: Ask the lighthouse with a :class:`MemberInfo` and a timeout in seconds. Returns a
            :class:`Quorum`, None after the timeout, or :class:`StillWaiting`.
        KEEP_WAITING: Wait a little longer: the same as of ``REQUEST``.
        READ_STATUS: Ask the lighthouse what it waits for: a text, empty if it does not answer.
        LEAVE_RUN: Leave the run for good: no more heartbeats, and no more requests.
    """

    ASK = enum.auto()
    DESCRIBE = enum.auto()
    PAUSE = enum.auto()
    OPEN = enum.auto()
    COMPARE = enum.auto()
    COPY = enum.auto()
    EXCHANGE = enum.auto()
    CONFIRM = enum.auto()
    RECEIVE = enum.auto()
    FINISH = enum.auto()
    SEND = enum.auto()
    LEAVE_GROUP = enum.auto()
    REQUEST = enum.auto()
    KEEP_WAITING = enum.auto()
    READ_STATUS = enum.auto()
    LEAVE_RUN = enum.auto()


class StillWaiting(NamedTuple):
    """The lighthouse has not answered yet; ``error`` is why it cannot be reached, or empty."""

    error: str = ""


Decision: TypeAlias = decisions.Decision[Do, T]


# -------------------------------------------------------------------------------- decisions


class RoundDecisions:
    """The decisions of one worker in all its rounds, which are run one after the other.

    Args:
        name: Name of this worker.
        place: Index of this rank within its worker; the first one asks the lighthouse, and warns.
        address: Address of the lighthouse, for messages.
        clock: Only read.
        is_stopping: Returns whether this worker was asked to stop: it then waits for no further
            members.
        num_finished: Returns how many members have announced that they have finished.
        is_check_due: Returns whether the members of a plan are to compare their states.
        min_workers: Least number of members of a round; members that have finished count, too.
        timeout_s: Longest wait for enough members, in seconds.

    Attributes:
        is_leaving: Whether this worker leaves after the requested rounds: they wait for no further
            members.
        has_left: Whether it has left the run, and completes its rounds alone.
        last_group: Group of the last round; empty if this worker kept its own state.
    """

    def __init__(
        self,
        name: str,
        place: int,
        address: str,
        clock: Clock,
        is_stopping: Callable[[], bool],
        num_finished: Callable[[], int],
        is_check_due: Callable[[QuorumPlan], bool],
        *,
        min_workers: int,
        timeout_s: float,
    ) -> None:
        self.is_leaving = self.has_left = False
        self.last_group = ""
        self._name = name
        self._place = place
        self._address = address
        self._clock = clock
        self._is_stopping = is_stopping
        self._get_num_finished = num_finished
        self._is_check_due = is_check_due
        self._min_workers = min_workers
        self._timeout_s = timeout_s
        self._malformed: set[str] = set()
        self._members: tuple[str, ...] = ()
        self._num_finished = 0
        self._num_alone = 0
        self._stopping_since: float | None = None
        self._warned_about: PendingRound | None = None
        self._warned_at = 0.0

    # ----------------------------------------------------------------------- a round

    def run(self, pending: PendingRound) -> Decision[None]:
        """Run a round, again if a member is lost, until it succeeds or the timeout has passed.

        RuntimeError if it has passed; ValueError if the run is another one.
        """
        started, round_index = self._clock.now(), pending.request.round_index
        received: RoundResult | None = None
        data_start: tuple[int, int, int] | None = None
        is_finished = False
        while not is_finished:
            plan = yield from self._find_members(pending, received, started)
            unconfirmed, received = received, None
            if unconfirmed is not None and plan.rank in plan.committed:
                # All that are left have received it, and one that is lost may have applied it. A
                # worker that also needs the state asks for that with a new request.
                if not unconfirmed.plan.is_joining:
                    self._warn(
                        "Round %d counts: all members that are left have received it.",
                        unconfirmed.plan.round_index,
                    )
                    yield Do.FINISH, self._finished(unconfirmed, data_start)
                    is_finished = True
                continue
            self._warn_lost(plan)
            if plan.is_new:  # kept if the exchange fails: a repeated one may be in the same group
                data_start = plan.data_position, plan.rank, len(plan.names)
            try:
                yield Do.OPEN, plan
                if self._is_check_due(plan):
                    plan = yield Do.COMPARE, plan
                    self._warn_drifted(plan)
                if plan.joining and plan.is_donor:
                    # Before the exchange, whose result the training thread applies to the state.
                    yield Do.COPY, plan
                result = RoundResult(plan)
                if plan.round_index != NO_STATE:
                    result = yield Do.EXCHANGE, plan
                    if plan.round_index == round_index:
                        received = result  # the others learn of it if the rest fails
                    yield Do.CONFIRM, None
                if plan.is_joining:
                    state = yield Do.RECEIVE, plan
                    result = dataclasses.replace(result, state=state)
                yield Do.FINISH, self._finished(result, data_start)
                is_finished = True
                if plan.joining and plan.is_donor:  # while the training thread continues
                    yield Do.SEND, plan
            except WorkerFailure:
                raise  # a rank of this worker is lost, and not another member
            except RuntimeError as error:
                yield Do.LEAVE_GROUP, None
                if not is_finished:
                    if self._clock.now() - started > self._timeout_s:
                        raise
                    text = str(error).partition("\n")[0]
                    what = "is repeated" if received is None else "may count already"
                    self._warn(
                        "Round %d %s, since a member was lost: %s", plan.round_index, what, text
                    )

    def _finished(
        self, result: RoundResult, data_start: tuple[int, int, int] | None
    ) -> RoundResult:
        # The next request says where the state is from: members that were in different groups
        # have different states.
        self.last_group = result.plan.group
        return dataclasses.replace(result, data_start=data_start)

    def _find_members(
        self, pending: PendingRound, received: RoundResult | None, started: float
    ) -> Decision[QuorumPlan]:
        """Ask for quorums until there are enough members; return the plan."""
        while True:
            group_and_members = [] if received is None else received.plan.group_and_members
            quorum = yield Do.ASK, (group_and_members, started)
            try:
                plan = make_plan(quorum, self._name, self._place)
            except OtherRun as other:
                raise ValueError((yield Do.DESCRIBE, other)) from None
            self._warn_malformed(plan)
            is_complete = len(plan.names) >= plan.min_members and not plan.missing
            # Members for which a failed exchange counts finish with it; the others ask again.
            if is_complete and (not plan.committed or plan.rank in plan.committed):
                return plan
            if not is_complete:
                self._warn_incomplete(pending, plan)
            yield Do.PAUSE, _RETRY_S

    # -------------------------------------------------------------- asking for a quorum

    def ask(self, pending: PendingRound, info: MemberInfo, started: float) -> Decision[Quorum]:
        """Ask for a quorum, on the first rank of a worker; RuntimeError if it is not complete.

        A worker that was asked to stop waits for :data:`STOP_WAIT_S` at most, and not at all if the
        lighthouse cannot be reached. It then leaves the run and completes its rounds alone.

        Args:
            pending: The round.
            info: The request, without what is decided here.
            started: When the round began.
        """
        is_last = self.is_leaving or self._is_stopping()
        info = info._replace(
            # A worker that leaves must not wait for others, which may have finished before.
            min_members=1 if is_last else self._min_workers - self._get_num_finished(),
            last_group=self.last_group,
        )
        quorum = None
        left_s = started + self._timeout_s - self._clock.now()
        if left_s > 0:
            quorum = yield from self._request(pending, info, left_s)
        if quorum is None:
            raise RuntimeError(
                f"Fewer than {self._min_workers} workers were there, or one that is alive did "
                f"not start round {info.round_index}, for {self._timeout_s:g} s. The page "
                "of the lighthouse (open its address in a browser) shows which are alive."
            )
        return quorum

    def _request(
        self, pending: PendingRound, info: MemberInfo, timeout_s: float
    ) -> Decision[Quorum | None]:
        # The lighthouse is closed, and the others continue without this worker.
        if self.has_left:
            return self._quorum_alone(info)
        answer = yield Do.REQUEST, (info, timeout_s)
        while isinstance(answer, StillWaiting):
            if self._gives_up(answer.error):
                self.has_left = True
                yield Do.LEAVE_RUN, None
                return self._quorum_alone(info)
            if self._is_time_to_warn(pending, bool(answer.error)):
                status = "" if answer.error else (yield Do.READ_STATUS, None)
                self._warn_of_wait(pending, self._describe_wait(pending, answer.error, status))
            answer = yield Do.KEEP_WAITING, None
        return answer  # type: ignore[no-any-return]

    def _quorum_alone(self, info: MemberInfo) -> Quorum:
        """Return a quorum of this worker only."""
        self._num_alone += 1
        data = info._replace(min_members=1).to_dict()
        return Quorum(f"{self._name}-{self._num_alone}", [Member(self._name, data)])

    def _gives_up(self, error: str) -> bool:
        """Whether this worker was asked to stop, and has waited long enough for the others."""
        if not self._is_stopping():
            return False
        now = self._clock.now()
        if self._stopping_since is None:
            self._stopping_since = now
        # Others that are stopped, too, come soon; a lighthouse that has ended does not come back.
        if not error and now - self._stopping_since < STOP_WAIT_S:
            return False
        log.warning(
            "This worker was asked to stop: it no longer waits for the others, and completes its "
            "round alone."
        )
        return True

    # ----------------------------------------------------------------------- warnings

    def _warn(self, message: str, *values: object) -> None:
        if self._place == 0:
            log.warning(message, *values)

    def _warn_malformed(self, plan: QuorumPlan) -> None:
        """Warn once about each worker whose request could not be read."""
        for name in set(plan.malformed) - self._malformed:
            self._warn(
                "Ignored %.100r: it has asked the lighthouse to take part, but its request is "
                "malformed, or of another version of lightning_loco. The round continues without "
                "it.",
                name,
            )
        self._malformed.update(plan.malformed)

    def _warn_lost(self, plan: QuorumPlan) -> None:
        """Warn about members of the last round that are gone without having finished."""
        lost, self._members = set(self._members) - set(plan.names), plan.names
        if not lost or self.has_left:
            return
        # An announcement does not say which member has finished.
        before, self._num_finished = self._num_finished, self._get_num_finished()
        if len(lost) <= self._num_finished - before:
            return
        self._warn(
            "Round %d continues without %s: ended, or no heartbeats at the lighthouse.%s",
            plan.round_index,
            ", ".join(sorted(lost)),
            _ALONE if len(plan.names) == 1 else "",
        )

    def _warn_drifted(self, plan: QuorumPlan) -> None:
        for rank in plan.drifted:
            self._warn(
                "Round %d: the outer parameters or the outer state of %s differ from the other "
                "members. It receives their state, and its message does not count.",
                plan.round_index,
                plan.names[rank],
            )

    def _warn_incomplete(self, pending: PendingRound, plan: QuorumPlan) -> None:
        """Warn, if it is time, that a plan has too few members or lacks some of the last round."""
        if self._place != 0 or not self._is_time_to_warn(pending, is_unreachable=False):
            return
        names, missing = ", ".join(plan.names), ", ".join(plan.missing)
        late = f"{missing}: alive, but the restarted lighthouse has had no heartbeat of theirs yet"
        expected = late if missing else "more workers"
        present = f"{len(plan.names)} of at least {plan.min_members} are there ({names})"
        self._warn_of_wait(pending, f"{pending.request} waits for {expected}. {present}")

    def _is_time_to_warn(self, pending: PendingRound, is_unreachable: bool) -> bool:
        """Whether the training thread has waited long enough since it began, or since a warning.

        Before that no worker is delayed: an overlapped round may take as long as local steps.
        """
        if pending.waited_since is None:
            return False
        if pending is not self._warned_about:
            first_s = WARN_UNREACHABLE_S if is_unreachable else WARN_EVERY_S
            self._warned_about = pending
            self._warned_at = pending.waited_since + first_s - WARN_EVERY_S
        return self._clock.now() - self._warned_at >= WARN_EVERY_S

    def _warn_of_wait(self, pending: PendingRound, what: str) -> None:
        assert pending.waited_since is not None
        self._warned_at = now = self._clock.now()
        log.warning(
            "%s. It has waited for %.0f s, and ends with an error after %g s.",
            what,
            now - pending.waited_since,
            self._timeout_s,
        )

    def _describe_wait(self, pending: PendingRound, error: str, status: str) -> str:
        if error:
            return (
                f"Cannot reach the lighthouse at {self._address} ({error}); start one there with "
                "`lightning-loco lighthouse`"
            )
        status = status or "its page in a browser shows which are alive"
        what = f"{pending.request} waits for other workers"
        return f"{what}. The lighthouse at {self._address}: {status}"
