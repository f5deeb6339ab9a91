"""The thread that runs the rounds of one worker, one after the other.

A round asks the lighthouse for a quorum, opens the group of its members and exchanges messages and
statuses; if a member is lost, it starts over with the remaining ones. A worker that has no state,
or an outdated one, receives the state of the run as well. What is done when is decided in
:mod:`lightning_loco.elastic.round_decisions`; here it is done. In a worker of several ranks each
has such a thread and such a group, and they take every step together.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from lightning_loco._util.background import BackgroundThread, run_in_thread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.decisions import carry_out
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.elastic.consistency import ConsistencyCheck
from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import UNRESPONSIVE_S, MemberGroup
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.places import Places
from lightning_loco.elastic.quorum import (
    Member,
    MemberInfo,
    OtherRun,
    Quorum,
    QuorumPlan,
    describe_difference,
)
from lightning_loco.elastic.recovery import RunState
from lightning_loco.elastic.round_decisions import (
    Decision,
    Do,
    RoundDecisions,
    StillWaiting,
)
from lightning_loco.elastic.round_request import PendingRound, RoundRequest, RoundResult

_CHECK_STOP_S, _PARTING_S = 0.2, 2.0
_CHECK_ALIVE_S = 5.0

log = logging.getLogger(__name__)


class RoundThread(BackgroundThread):
    """Runs the requested rounds in order.

    Args:
        lighthouse: Decides which workers take part; the first rank of a worker asks it.
        places: The ranks of this worker.
        is_stopping: Returns whether this worker was asked to stop.
        group: The process group.
        exchange: Exchanges the messages in it.
        run: Settings and schema of this worker's run, as plain values.
        data_shard: Its position decides where new members continue.
        min_workers: Least number of members of a round; members that have finished count, too.
        timeout_s: Longest wait for enough members, in seconds.
        consistency: Compares the members' states.
        clock: Clock for its waits.

    Attributes:
        decisions: What this worker decides in its rounds.
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
        clock: Clock = REAL_CLOCK,
    ) -> None:
        super().__init__("loco-rounds")
        self.decisions = RoundDecisions(
            lighthouse.name,
            places.place,
            lighthouse.address,
            clock,
            is_stopping,
            group.count_finished,
            consistency.is_due,
            min_workers=min_workers,
            timeout_s=timeout_s,
        )
        self._clock = clock
        self._lighthouse = lighthouse
        self._places = places
        self._requester = QuorumRequester(lighthouse, group.live_members)
        self._group = group
        self._exchange = exchange
        self._run_settings = run
        text = json.dumps(run)
        self._run_hash = hashlib.sha256(text.encode()).hexdigest()
        group.publish_run(text)
        self._data_shard = data_shard
        self._timeout_s = timeout_s
        self._consistency = consistency
        self._copying: Future[RunState] | None = None
        self._copied: RunState | None = None
        self._requests: queue.SimpleQueue[PendingRound | None] = queue.SimpleQueue()

    # -------------------------------------------------------- called by other threads

    def submit(self, pending: PendingRound) -> None:
        """Run a round after those that were submitted before."""
        self._requests.put(pending)

    def leave(self, has_finished: bool) -> None:
        """Complete the pending round, then leave the run.

        If this worker ``has_finished``, the others need not wait for a replacement.
        """
        self.decisions.is_leaving = True
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
        while (pending := self._next_request()) is not None:
            self._data_shard.start_round()
            try:
                carry_out(self.decisions.run(pending), functools.partial(self._do, pending))
            except BaseException as error:
                if pending.done():  # the round counts, and what fails next is another matter
                    log.warning("%s is complete, but then failed: %s", pending.request, error)
                else:
                    pending.set_exception(error)  # the training thread raises it
            self._copying = self._copied = None  # as large as the model

    def _next_request(self) -> PendingRound | None:
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

    def _do(self, pending: PendingRound, what: Do, argument: Any) -> Any:
        """Do what was decided; RuntimeError if a member is lost, or fails on another rank.

        A round counts for the whole worker or not at all, so its ranks take together whatever may
        fail on one of them.
        """
        request, plan, together = pending.request, argument, self._places.together
        copy = functools.partial(self._exchange.copy_state, request)
        match what:
            case Do.ASK:
                return self._ask_quorum(pending, *argument)
            case Do.DESCRIBE:
                return self._places.ask_first(lambda: self._describe_difference(argument))
            case Do.PAUSE:
                self._clock.sleep(argument)
            case Do.OPEN:
                # A copy takes about as long as the other members need to come.
                copies = plan.joining and plan.is_donor
                self._copying, self._copied = run_in_thread(copy) if copies else None, None
                together(lambda: self._group.open(plan))
            case Do.COMPARE:
                compare = functools.partial(self._consistency.compare, plan, self._group.all_gather)
                return together(compare)
            case Do.COPY:
                # After a comparison, another member may be the one that sends its state.
                copying, self._copying = None if plan.drifted else self._copying, None
                self._copied = together(copy if copying is None else copying.result)
            case Do.EXCHANGE:
                return together(lambda: self._exchange_messages(request, plan))
            case Do.CONFIRM:
                together(self._group.confirm)
            case Do.RECEIVE:
                return together(lambda: self._exchange.receive_state(plan))
            case Do.FINISH:
                pending.set_result(_settled(request, argument))
            case Do.SEND:
                assert self._copied is not None
                self._exchange.send_state(self._copied, plan)
            case Do.LEAVE_GROUP:
                self._group.abort()
        return None

    def _ask_quorum(self, pending: PendingRound, received: list[str], started: float) -> Quorum:
        own = self._group.name, self._group.address, self._data_shard.first_unused
        groups, stores, positions = zip(*self._places.gather(own), strict=True)
        info = MemberInfo(
            pending.request.round_index,
            # Ranks that are in different groups, since one has left its own, open a new one.
            groups[0] if len(set(groups)) == 1 else "",
            list(stores),
            max(positions),
            self._run_hash,
            min_members=1,
            last_group="",
            received=received,
            awaited=[],
        )

        def ask() -> Quorum:
            return self._requester.run(self.decisions.ask(pending, info, started))

        number, members = self._places.ask_first(ask)
        return Quorum(number, [Member(*member) for member in members])

    def _describe_difference(self, other: OtherRun) -> str:
        theirs = self._group.read_run(other.store, other.member)
        try:
            return describe_difference(self._run_settings, dict(json.loads(theirs)), other.member)
        except (ValueError, TypeError):
            return f"This worker cannot join: its run differs from the run of {other.member}."

    def _exchange_messages(self, request: RoundRequest, plan: QuorumPlan) -> RoundResult:
        """Return the result of the exchange, with the statuses of all members."""
        status = request.status._replace(round_index=plan.round_index)
        if plan.is_joining:
            status = status._replace(weight=0.0)
        # Statuses travel during the exchange, which takes longer.
        wait_for_statuses = self._group.start_all_gather(
            torch.tensor(status.numbers, dtype=torch.float64, device="cpu")
        )
        message = None if plan.is_joining else request.message
        assert plan.is_joining or message is not None
        result = self._exchange.exchange(message, status.weight, plan)
        return dataclasses.replace(result, statuses=wait_for_statuses())


def _settled(request: RoundRequest, result: RoundResult) -> RoundResult:
    """Copy what was received into the message, where the training thread would write it anyway.

    Only with overlap, since it saves time only if it is done during local steps; and not for a
    joining worker, whose engine applies another round.
    """
    received, message = result.received, request.message
    if received is None or message is None or not request.is_overlapped or result.plan.is_joining:
        return result
    return dataclasses.replace(result, received=message.copy_(received))


class QuorumRequester:
    """Carries out :meth:`RoundDecisions.ask`; ``live_members`` returns members known to be alive.

    The call of torchft does not return before the quorum is complete. It runs in another thread, so
    that a worker that is asked to stop meanwhile can give it up.
    """

    def __init__(self, lighthouse: Lighthouse, live_members: Callable[[], list[str]]) -> None:
        self._lighthouse = lighthouse
        self._live_members = live_members
        self._requesting: Future[Quorum | None] | None = None

    def run(self, decision: Decision[Quorum]) -> Quorum:
        """Return the quorum that is decided on; RuntimeError if there is none.

        Also if the lighthouse cannot be reached, or :meth:`RoundThread.close` is called.
        """
        try:
            return carry_out(decision, self._do)
        finally:
            self._requesting = None

    def _do(self, what: Do, argument: Any) -> Any:
        match what:
            case Do.REQUEST:
                work = functools.partial(self._request, *argument)
                self._requesting = run_in_thread(work, exit_timeout_s=0.0)
                return self._wait_a_little()
            case Do.KEEP_WAITING:
                return self._wait_a_little()
            case Do.READ_STATUS:
                return self._lighthouse.status()
            case Do.LEAVE_RUN:
                return self._lighthouse.close()

    def _request(self, info: MemberInfo, timeout_s: float) -> Quorum | None:
        lighthouse = self._lighthouse

        def make_data() -> dict[str, Any]:
            # A restarted lighthouse does not know the other members yet, and would let those that
            # ask first continue without them; also in their last round, for those that have
            # finished serve no store any more, and count as not alive.
            has_restarted = lighthouse.uptime.has_restarted(UNRESPONSIVE_S)
            return info._replace(awaited=self._live_members() if has_restarted else []).to_dict()

        return lighthouse.quorum(make_data, timeout_s)

    def _wait_a_little(self) -> Quorum | StillWaiting | None:
        assert self._requesting is not None
        if wait([self._requesting], _CHECK_STOP_S).done:
            return self._requesting.result()
        if self._lighthouse.uptime.is_closed:
            raise RuntimeError("This worker has left the run.")
        return StillWaiting(self._lighthouse.error)
