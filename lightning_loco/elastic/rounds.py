"""The thread that runs the rounds of one worker, one after the other.

A round asks the lighthouse for a quorum, opens the group of its members and exchanges messages and
statuses; if a member is lost, it starts over with the remaining ones. A worker that has no state,
or an outdated one, receives the state of the run as well. In a worker of several ranks each has
such a thread and such a group, and they take every step together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.background import BackgroundThread, run_in_thread
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.elastic.consistency import ConsistencyCheck
from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import UNRESPONSIVE_S, MemberGroup
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.places import Places
from lightning_loco.elastic.quorum import (
    NO_STATE,
    Commit,
    Member,
    MemberInfo,
    OtherRun,
    Quorum,
    QuorumPlan,
    describe_difference,
    make_plan,
)
from lightning_loco.elastic.recovery import RunState

WARN_EVERY_S = 10.0
"""Time between two warnings about what a round waits for."""

WARN_UNREACHABLE_S = 3.0
"""Time until the first warning if the lighthouse cannot be reached."""

STOP_WAIT_S = 10.0
"""How long a worker that was asked to stop waits for the others to start its round."""

_CHECK_STOP_S, _RETRY_S, _PARTING_S = 0.2, 0.2, 2.0
_CHECK_ALIVE_S = 5.0

_ALONE = (
    " This worker is alone now and continues from its own state. If the lighthouse received no "
    "heartbeats from this worker, because it was stopped or cut off, the others have continued "
    "without it and may have finished with different weights."
)

log = logging.getLogger(__name__)


class RoundRequest:
    """A round that the training thread asks for and the round thread runs, like a future.

    Args:
        round_index: The round; ``NO_STATE``, or a ``resumed_round``, to join a run.
        status: This worker's status.

    Attributes:
        position: Position of the engine at the start of the round, for joining workers.
        message: This worker's message; None if it only joins. Must stay unchanged until the round
            is done, since the exchange may have to be repeated.
        is_overlapped: Whether the training thread takes local steps meanwhile.
        message_ready: To be set once message and position are there, and the state will not change
            until the result is applied.
        received: Sum of the messages; None if the run has only begun.
        statuses: Statuses of all members, of shape ``(members, width)``.
        residual: What compression removed from the message, if there is error feedback.
        bytes_sent: Bytes of messages that this worker sent.
        bytes_saved: Bytes that it would have sent in addition without compression.
        commit: Result of an exchange that not all members have confirmed yet.
        plan: QuorumPlan of the exchange that succeeded; None before.
        data_start: Where to continue in the stream of samples, as arguments of
            :meth:`DataShard.reassign`; None if the members are the same as before.
        state: State of the run, if this worker needed it.
        is_adopted: Whether the engine has resumed from that state.
        error: Why the round failed.
        waited_since: When the training thread began to wait, by ``time.monotonic()``.
    """

    def __init__(self, round_index: int, status: WorkerStatus) -> None:
        self.round_index = round_index
        self.status = status
        self.position: dict[str, Any] = {}
        self.message: Tensor | None = None
        self.is_overlapped = False
        self.message_ready = threading.Event()
        self.received: Tensor | None = None
        self.statuses: Tensor | None = None
        self.residual: Tensor | None = None
        self.bytes_sent = self.bytes_saved = 0
        self.commit: Commit | None = None
        self.plan: QuorumPlan | None = None
        self.data_start: tuple[int, int, int] | None = None
        self.state: RunState | None = None
        self.is_adopted = False
        self.error: BaseException | None = None
        self.waited_since: float | None = None
        self._done = threading.Event()

    @property
    def has_drifted(self) -> bool:
        """Whether this worker received the state because its own differed from the others'."""
        return self.plan is not None and self.plan.rank in self.plan.drifted

    def set_done(self, error: BaseException | None = None) -> None:
        """Mark the round as complete, or as failed."""
        self.error = error
        self._done.set()

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the round is done; raises the error if it failed."""
        if self.waited_since is None:
            self.waited_since = time.monotonic()
        self._done.wait()
        if self.error is not None:
            raise self.error

    def __str__(self) -> str:
        """Its name in messages."""
        if self.round_index <= NO_STATE:
            return "This worker, which joins the run,"
        return f"Round {self.round_index}"


class RoundThread(BackgroundThread):
    """Runs the requested rounds in order.

    Args:
        lighthouse: Decides which workers take part; the first rank of a worker asks it.
        places: The ranks of this worker.
        is_stopping: Returns whether this worker was asked to stop: it then waits for no further
            members.
        group: The process group.
        exchange: Exchanges the messages in it.
        run: Settings and schema of this worker's run, as plain values.
        data_shard: Its position decides where new members continue.
        min_workers: Least number of members of a round; members that have finished count, too.
        timeout_s: Longest wait for enough members, in seconds.
        consistency: Compares the members' states.

    Attributes:
        is_leaving: Whether this worker leaves after the requested rounds: they wait for no further
            members.
        last_group: Group of the last round; empty if this worker kept its own state.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        places: Places,
        is_stopping: Callable[[], bool],
        group: MemberGroup,
        exchange: SumExchange,
        run: dict[str, Any],
        *,
        data_shard: DataShard,
        min_workers: int,
        timeout_s: float,
        consistency: ConsistencyCheck,
    ) -> None:
        super().__init__("loco-rounds")
        self._lighthouse = lighthouse
        self._places = places
        self._requester = QuorumRequester(lighthouse, group.live_members, is_stopping, timeout_s)
        self._group = group
        self._exchange = exchange
        self._run_settings = run
        text = json.dumps(run)
        self._run_hash = hashlib.sha256(text.encode()).hexdigest()
        group.publish_run(text)
        self._data_shard = data_shard
        self._min_workers = min_workers
        self._timeout_s = timeout_s
        self._consistency = consistency
        self.is_leaving = False
        self.last_group = ""
        self._malformed: set[str] = set()
        self._members: tuple[str, ...] = ()
        self._num_finished = 0
        self._requests: queue.SimpleQueue[RoundRequest | None] = queue.SimpleQueue()

    # -------------------------------------------------------- called by other threads

    def submit(self, request: RoundRequest) -> None:
        """Run a round after those that were submitted before."""
        self._requests.put(request)

    def leave(self, has_finished: bool) -> None:
        """Complete the pending round, then leave the run.

        If this worker ``has_finished``, the others need not wait for a replacement.
        """
        self.is_leaving = True
        self._requests.put(None)
        self.join(_PARTING_S)
        if self.is_alive():
            log.warning(
                "This worker leaves when its pending round is complete: it waits for the others, "
                "for %g s at the most.",
                self._timeout_s,
            )
            self.join(self._timeout_s)
        if has_finished:
            self._group.announce_finished()
        self.close()

    def close(self) -> None:
        """Leave the run at once; the others complete the pending round without this worker."""
        self._requests.put(None)
        self._lighthouse.close()
        self.join(_PARTING_S)
        self._group.close()

    def end_with_process(self) -> float:
        """Leave the run."""
        self._requests.put(None)
        self._lighthouse.close()
        return _PARTING_S

    # ----------------------------------------------------------------- the round thread

    def run(self) -> None:
        """Run rounds until :meth:`close`."""
        while (request := self._next_request()) is not None:
            try:
                self._run_round(request)
            except BaseException as error:  # the training thread raises it
                request.set_done(error)

    def _next_request(self) -> RoundRequest | None:
        """Wait for a request; leave the run meanwhile if another rank of this worker is lost.

        The ranks that are left may be blocked in a collective, and cannot run another round.
        """
        is_watching = self._places.size > 1 and self._places.is_first
        while True:
            try:
                return self._requests.get(timeout=_CHECK_ALIVE_S if is_watching else None)
            except queue.Empty:
                pass
            try:
                self._places.check_alive()
            except WorkerFailure as failure:
                log.error("%s", failure)
                self._lighthouse.close()
                is_watching = False

    def _run_round(self, request: RoundRequest) -> None:
        """Run a round, again if a member is lost, until it succeeds or the timeout has passed."""
        started = time.monotonic()
        self._data_shard.start_round()
        while request.plan is None:
            plan = self._wait_for_members(request, started)
            commit, request.commit = request.commit, None
            if commit is not None and plan.rank in plan.committed:
                self._finish_committed(request, commit)
                continue
            self._warn_lost(plan)
            if plan.is_new:
                request.data_start = plan.data_position, plan.rank, len(plan.names)
            copy = functools.partial(self._copy_state, request, plan)
            copying = run_in_thread(copy) if plan.joining else None  # while the group is created
            try:
                self._attempt(request, plan, copying)
            except WorkerFailure:
                raise
            except RuntimeError as error:
                self._group.abort()
                if time.monotonic() - started > self._timeout_s:
                    raise
                text = str(error).partition("\n")[0]
                what = "is repeated" if request.commit is None else "may count already"
                self._warn("Round %d %s, since a member was lost: %s", plan.round_index, what, text)

    def _warn(self, message: str, *values: object) -> None:
        if self._places.is_first:
            log.warning(message, *values)

    def _wait_for_members(self, request: RoundRequest, started: float) -> QuorumPlan:
        """Ask for quorums until there are enough members; return the plan."""
        while True:
            quorum = self._request_quorum(request, started)
            try:
                plan = make_plan(quorum, self._lighthouse.name, self._places.place)
            except OtherRun as other:
                describe = functools.partial(self._describe_difference, other)
                raise ValueError(self._places.ask_first(describe)) from None
            self._warn_malformed(plan)
            is_complete = len(plan.names) >= plan.min_members and not plan.missing
            if is_complete and (not plan.committed or plan.rank in plan.committed):
                return plan
            if not is_complete and self._places.is_first:
                self._requester.warn_incomplete(request, plan)
            time.sleep(_RETRY_S)

    def _request_quorum(self, request: RoundRequest, started: float) -> Quorum:
        """Ask for a quorum, for all ranks of this worker; RuntimeError if it is not complete."""
        own = self._group.name, self._group.address, self._data_shard.first_unused
        groups, stores, positions = zip(*self._places.gather(own), strict=True)

        def ask() -> Quorum:
            is_last = self.is_leaving or self._requester.is_stopping()
            info = MemberInfo(
                request.round_index,
                groups[0] if len(set(groups)) == 1 else "",
                list(stores),
                max(positions),
                self._run_hash,
                min_members=1 if is_last else self._min_workers - self._group.num_finished,
                last_group=self.last_group,
                received=[] if request.commit is None else request.commit.group_and_members,
                awaited=[],
            )
            left_s = started + self._timeout_s - time.monotonic()
            quorum = None
            if left_s > 0:
                quorum = self._requester.quorum(request, info, not is_last, left_s)
            if quorum is None:
                raise RuntimeError(
                    f"Fewer than {self._min_workers} workers were there, or one that is alive did "
                    f"not start round {request.round_index}, for {self._timeout_s:g} s. The page "
                    "of the lighthouse (open its address in a browser) shows which are alive."
                )
            return quorum

        number, members = self._places.ask_first(ask)
        return Quorum(number, [Member(*member) for member in members])

    def _describe_difference(self, other: OtherRun) -> str:
        theirs = self._group.read_run(other.store, other.member)
        try:
            return describe_difference(self._run_settings, dict(json.loads(theirs)), other.member)
        except (ValueError, TypeError):
            return f"This worker cannot join: its run differs from the run of {other.member}."

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
        if not lost or self._requester.has_left:
            return
        before, self._num_finished = self._num_finished, self._group.num_finished
        if len(lost) <= self._num_finished - before:
            return
        self._warn(
            "Round %d continues without %s: ended, or no heartbeats at the lighthouse.%s",
            plan.round_index,
            ", ".join(sorted(lost)),
            _ALONE if len(plan.names) == 1 else "",
        )

    def _copy_state(self, request: RoundRequest, plan: QuorumPlan) -> RunState | None:
        """Copy the state if this worker sends it to joining ones; may run in another thread."""
        if not plan.is_donor:
            return None
        request.message_ready.wait()
        return self._exchange.copy_state(request.position, request.message)

    def _compare_states(self, plan: QuorumPlan) -> QuorumPlan:
        """Return a plan in which members whose state has drifted receive the others' state."""
        plan = self._consistency.compare(plan, self._group.all_gather)
        for rank in plan.drifted:
            self._warn(
                "Round %d: the outer parameters or the outer state of %s differ from the other "
                "members. It receives their state, and its message does not count.",
                plan.round_index,
                plan.names[rank],
            )
        return plan

    def _attempt(
        self, request: RoundRequest, plan: QuorumPlan, copying: Future[RunState | None] | None
    ) -> None:
        """Exchange once; afterwards send the state, while the training thread continues."""
        together = self._places.together
        together(lambda: self._group.open(plan))
        if self._consistency.is_due(plan):
            request.message_ready.wait()
            plan = together(functools.partial(self._compare_states, plan))
        state = None
        if plan.joining:
            copy = functools.partial(self._copy_state, request, plan)
            state = together(copy if copying is None or plan.drifted else copying.result)
        received, statuses = None, None
        if plan.round_index != NO_STATE:
            commit = together(lambda: self._exchange_messages(request, plan))
            if request.round_index == plan.round_index:
                request.commit = commit
            received, statuses = commit.received, commit.statuses
            together(self._group.confirm)
        if plan.is_joining:
            request.state = together(lambda: self._exchange.receive_state(plan))
        elif received is not None:
            received = self._settle(request, received)
        self._finish(request, plan, received, statuses)
        if state is not None:
            self._exchange.send_state(state, plan)

    def _exchange_messages(self, request: RoundRequest, plan: QuorumPlan) -> Commit:
        """Return the result of the exchange, and the statuses of all members."""
        status = request.status._replace(round_index=plan.round_index)
        if plan.is_joining:
            status = status._replace(weight=0.0)
        wait_for_statuses = self._group.start_all_gather(
            torch.tensor(status.numbers, dtype=torch.float64, device="cpu")
        )
        message = None
        if not plan.is_joining:
            request.message_ready.wait()
            message = request.message
            assert message is not None
        exchanged = self._exchange.exchange(message, plan)
        request.residual = exchanged.residual
        request.bytes_sent, request.bytes_saved = exchanged.bytes_sent, exchanged.bytes_saved
        return Commit(plan, exchanged.received, wait_for_statuses())

    def _finish_committed(self, request: RoundRequest, commit: Commit) -> None:
        """Finish with the result of an exchange that counts although it failed for this worker.

        A worker that also needs the state asks for it in another round.
        """
        plan, received = commit.plan, commit.received
        if plan.is_joining:
            return
        self._warn("Round %d counts: all members that are left have received it.", plan.round_index)
        self._finish(request, plan, self._settle(request, received), commit.statuses)

    def _settle(self, request: RoundRequest, received: Tensor) -> Tensor:
        """Copy the result into the message, where the training thread would write it anyway.

        Only with overlap, since it saves time only if it is done during local steps.
        """
        if not request.is_overlapped or request.message is None:
            return received
        return request.message.copy_(received)

    def _finish(
        self,
        request: RoundRequest,
        plan: QuorumPlan,
        received: Tensor | None,
        statuses: Tensor | None,
    ) -> None:
        request.received, request.statuses, request.plan = received, statuses, plan
        request.commit, self.last_group = None, plan.group
        request.set_done()


class QuorumRequester:
    """Requests quorums from the lighthouse, in a separate thread.

    The call of torchft does not return before the quorum is complete. It runs in another thread, so
    that a worker that ``is_stopping`` meanwhile can give it up. If it ``has_left`` the run, it
    completes its rounds alone. ``live_members`` returns members of the last group that are alive,
    as far as is known; messages name ``timeout_s``, the longest wait of a round, in seconds.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        live_members: Callable[[], list[str]],
        is_stopping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._lighthouse = lighthouse
        self._live_members = live_members
        self._timeout_s = timeout_s
        self.is_stopping = is_stopping
        self.has_left = False
        self._stopping_since: float | None = None
        self._warned_about: RoundRequest | None = None
        self._warned_at = 0.0

    def quorum(
        self, request: RoundRequest, info: MemberInfo, waits: bool, timeout_s: float
    ) -> Quorum | None:
        """Return a quorum; None if it is not complete within the timeout.

        A worker that was asked to stop waits for :data:`STOP_WAIT_S` at most, and not at all if the
        lighthouse cannot be reached. It then leaves the run and completes its rounds alone.

        If the round ``waits`` for further members, a restarted lighthouse is also sent those that
        it may not know yet. RuntimeError if the lighthouse cannot be reached, or
        :meth:`RoundThread.close` is called.
        """
        if self.has_left:
            return self._quorum_alone(info)

        def make_data() -> dict[str, Any]:
            names_members = waits and self._lighthouse.uptime.has_restarted(UNRESPONSIVE_S)
            return info._replace(awaited=self._live_members() if names_members else []).to_dict()

        requesting = run_in_thread(
            lambda: self._lighthouse.quorum(make_data, timeout_s), exit_timeout_s=0.0
        )
        try:
            while not wait([requesting], _CHECK_STOP_S).done:
                if self._lighthouse.uptime.is_closed:
                    raise RuntimeError("This worker has left the run.")
                if self._should_leave():
                    self.has_left = True
                    self._lighthouse.close()
                    return self._quorum_alone(info)
                self._warn(request, lambda: self._describe_wait(request))
            return requesting.result()
        finally:
            del requesting  # a reference cycle, from the error's frames back to the error

    def warn_incomplete(self, request: RoundRequest, plan: QuorumPlan) -> None:
        """Warn, if it is time, that a plan has too few members or lacks some of the last round."""
        names, missing = ", ".join(plan.names), ", ".join(plan.missing)
        late = f"{missing}: alive, but the restarted lighthouse has had no heartbeat of theirs yet"
        expected = late if missing else "more workers"
        present = f"{len(plan.names)} of at least {plan.min_members} are there ({names})"
        self._warn(request, lambda: f"{request} waits for {expected}. {present}")

    def _quorum_alone(self, info: MemberInfo) -> Quorum:
        """Return a quorum of this worker only."""
        data = info._replace(min_members=1).to_dict()
        return Quorum(secrets.token_hex(8), [Member(self._lighthouse.name, data)])

    def _should_leave(self) -> bool:
        if not self.is_stopping():
            return False
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
        if not self._lighthouse.error and now - self._stopping_since < STOP_WAIT_S:
            return False
        log.warning(
            "This worker was asked to stop: it no longer waits for the others, and completes its "
            "round alone."
        )
        return True

    def _warn(self, request: RoundRequest, describe: Callable[[], str]) -> None:
        """Warn that a round waits, once the training thread has waited long enough."""
        now = time.monotonic()
        if request.waited_since is None:
            return
        if request is not self._warned_about:
            first_s = WARN_UNREACHABLE_S if self._lighthouse.error else WARN_EVERY_S
            self._warned_about = request
            self._warned_at = request.waited_since + first_s - WARN_EVERY_S
        if now - self._warned_at < WARN_EVERY_S:
            return
        self._warned_at = now
        log.warning(
            "%s. It has waited for %.0f s, and ends with an error after %g s.",
            describe(),
            now - request.waited_since,
            self._timeout_s,
        )

    def _describe_wait(self, request: RoundRequest) -> str:
        address, error = self._lighthouse.address, self._lighthouse.error
        if error:
            return (
                f"Cannot reach the lighthouse at {address} ({error}); start one there with "
                "`lightning-loco lighthouse`"
            )
        status = self._lighthouse.status() or "its page in a browser shows which are alive"
        return f"{request} waits for other workers. The lighthouse at {address}: {status}"
