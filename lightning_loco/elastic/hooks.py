"""What a member of an elastic run does around its rounds: join, catch up, finish."""

from __future__ import annotations

from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.connection import ElasticConnection, MemberStatuses
from lightning_loco.elastic.quorum import NO_STATE, QuorumPlan, resumed_round
from lightning_loco.elastic.recovery import (
    RunState,
    apply_saved_rounds,
    fragment_of_round,
    is_ahead,
    position_of,
    resume_from_state,
)
from lightning_loco.elastic.round_request import PendingRound, RoundRequest, RoundResult
from lightning_loco.engine.engine import Engine, RoundHooks, run_through
from lightning_loco.engine.fragment_sync import FragmentSync, Round


class ElasticHooks(RoundHooks):
    """Keeps one engine in the state of the run, which its ``connection`` exchanges.

    A worker that has fallen behind the others resumes from their state where it waits for a round
    anyway: when a blocking round was received, when the statuses of a round are recorded, and
    before it looks what is due.
    """

    shares_sync_points = False

    def __init__(self, connection: ElasticConnection) -> None:
        self._connection = connection
        self._seen: RoundResult | None = None

    def start(self, engine: Engine) -> None:
        """Join the run; a worker without state, or with an older one, receives the run's state.

        If a round is pending, this worker takes part in it with weight 0. A worker that has a later
        round from a checkpoint starts with that one instead.
        """
        connection, worker = self._connection, engine.worker
        connection.open(engine)
        apply_saved_rounds(engine)
        round_index = resumed_round(worker.round_index) if worker.steps else NO_STATE
        status = WorkerStatus(IN_ROUND, NO_STATE, 0, weight=0.0, finite=1.0)
        position = position_of(engine, connection.loop, worker.round_index)
        position["steps_since_round"] = worker.steps_since_round
        try:
            pending = connection.submit(RoundRequest(round_index, status, position))
            result = pending.wait()
            self._continue_data(result)
            engine.statistics.members = len(result.plan.names)
            if is_ahead(engine, result.state):
                # The others recover from this worker, in the round that it starts.
                connection.keep_own_state()
                return
            if result.state is not None:
                self._resume(engine, result, result.state)
            if result.received is not None:
                assert result.state is not None
                sync = self._add_pending_round(engine, pending, result.plan, result.state).fragment
                if not engine.settings.schedule.is_overlapped(worker.round_index):
                    sync.make_writable()
                    sync.apply(worker.steps)
                    engine.add_up(sync)
                    worker.replica.share()
                # The round has begun on the other members.
                worker.round_index += 1
        except BaseException:
            connection.close()
            raise

    def when_due(self, engine: Engine) -> bool:
        """Catch up, which may replace this worker's state, and its pending rounds."""
        engine.record_statuses()
        return True

    def before_round(self, engine: Engine, fragment: FragmentSync) -> None:
        """End the rounds of other fragments: a joining worker gets the state between two rounds."""
        for index, other in enumerate(engine.fragments):
            if other is not fragment:
                run_through(engine.end_in_parts(index))

    def received(self, engine: Engine, received: Round) -> Round:
        """Return the run's round in place of the own one if this worker is behind."""
        return self._catch_up(engine) or received

    def recorded(self, engine: Engine) -> None:
        """Catch up."""
        self._catch_up(engine)

    def finish(self, engine: Engine) -> None:
        """Run a last round of each fragment, if it has local steps that are in no round yet.

        Outer parameters, which are equal on all members, are what this worker can leave in the
        model without waiting for others.
        """
        self._connection.finish()
        for _ in engine.fragments:
            if any(status.steps > 0 for status in engine.sync_point("the end of training")):
                run_through(engine.begin_in_parts())
            elif len(engine.fragments) > 1:
                engine.worker.round_index += 1
        run_through(engine.apply_all_in_parts())

    def close(self) -> None:
        """Leave the run: at once, or after the pending round if :meth:`finish` was called."""
        self._connection.close()

    # ------------------------------------------------------------------------ recovery

    def _catch_up(self, engine: Engine) -> Round | None:
        """Wait for the pending round; if this worker is behind, resume from the run's state.

        Its local steps since it was left behind are lost. The round of the run, possibly one of
        another fragment, then replaces the pending one and is returned.
        """
        pending = self._connection.pending
        if pending is None:
            return None
        with WaitTimer(engine.statistics):
            result = pending.wait()
        if result is self._seen:
            return None
        self._seen = result
        self._continue_data(result)
        has_pending = any(sync.pending is not None for sync in engine.fragments)
        if result.state is None or not has_pending:
            return None
        request, plan = pending.request, result.plan
        started = engine.worker.round_index - request.round_index
        missed_steps = _missed_steps(engine, request, result.state) if started else 0
        for sync, began_at in zip(engine.fragments, request.position["began_at"], strict=True):
            sync.drop_pending()
            lost = (engine.worker.steps - began_at) / len(engine.fragments)
            engine.statistics.lost_steps += lost
        self._resume(engine, result, result.state, missed_steps)
        engine.worker.round_index = plan.round_index + started
        return self._add_pending_round(engine, pending, plan, result.state)

    def _continue_data(self, result: RoundResult) -> None:
        """Continue where the members of a new group have agreed to.

        Only here, after the same local step on all ranks of a worker: ranks of one tensor-parallel
        group must read the same samples.
        """
        if result.data_start is not None:
            self._connection.data_shard.reassign(*result.data_start)

    def _resume(
        self, engine: Engine, result: RoundResult, state: RunState, missed_steps: int = 0
    ) -> None:
        """Resume from the state that came with a round, as it was at the start of the round."""
        plan = result.plan
        resume_from_state(
            engine,
            self._connection.loop,
            state,
            plan.names[plan.donor],
            keep_position=plan.has_drifted,
            missed_steps=missed_steps,
        )
        engine.worker.replica.share()

    def _add_pending_round(
        self, engine: Engine, pending: PendingRound, plan: QuorumPlan, state: RunState
    ) -> Round:
        """Make pending the round whose state this worker resumed from; it has no weight in it.

        Its fragment, to which all members apply the result, may be another one than before.
        """
        position = pending.request.position if plan.has_drifted else state.values
        index = plan.round_index
        label, statistics = f"round {index}", engine.statistics
        sync = fragment_of_round(engine, index)
        sync.began_at = int(position["steps"])
        sync.pending = Round(
            sync,
            index,
            sync.began_at,
            weight=0.0,
            is_overlapped=engine.settings.schedule.is_overlapped(index),
            statuses=MemberStatuses(pending.request.status, statistics, label, pending),
            handles=[self._connection.handle_of(pending)],
        )
        for bucket in sync.memory.buckets:
            # It has no weight, and adds nothing to the sum.
            bucket.message.zero_()
            if bucket.own_message is not None:
                bucket.own_message.zero_()
        return sync.pending


def _missed_steps(engine: Engine, request: RoundRequest, state: RunState) -> int:
    """The local steps between the start of the run's round and this worker's position.

    The position is the one in its own round, which may be shorter or longer.
    """
    theirs = state.values["steps_under_way"]
    made = engine.worker.steps - request.position["steps"]
    return int(theirs if made >= request.position["steps_under_way"] else min(made, theirs))
