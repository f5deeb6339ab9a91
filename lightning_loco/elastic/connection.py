"""An engine's connection with the members: the exchange and the statuses of its rounds."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import IN_ROUND, PendingStatuses, WorkerStatus
from lightning_loco.elastic.consistency import Consistency, fingerprint
from lightning_loco.elastic.elastic_round import Carried, ElasticRound, statuses_of
from lightning_loco.elastic.exchanges import Summing
from lightning_loco.elastic.gossip import Mixing
from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.lighthouse import Lighthouse, address_towards
from lightning_loco.elastic.membership import Elastic
from lightning_loco.elastic.quorum import NO_STATE, resumed
from lightning_loco.elastic.recovery import (
    apply_saved_rounds,
    follow,
    is_ahead,
    outer_state,
    position_of,
    take_part,
)
from lightning_loco.elastic.rounds import ElasticRounds
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.base import Handle
from lightning_loco.engine.membership import DataShare, Host
from lightning_loco.engine.settings import RoundSettings

_OWN_AFFAIRS = ("sync_every", "bucket_bytes")


class ElasticLink:
    """Connects one engine; see :class:`lightning_loco.engine.membership.Link`.

    Args:
        asked: What the user says.
        settings: Of the engine.

    Attributes:
        is_weighted: Whether messages are added up; otherwise they are mixed by a topology.
        share: Of the data.
        host: Reads the position of the program around the engine, as plain values, and goes on from
            that of another worker.
        last: The pending round that has landed last, with the members' statuses; None before the
        first one.
    """

    carries_status = False

    def __init__(self, asked: Elastic, settings: RoundSettings) -> None:
        self.is_weighted = settings.algorithm.exchange == "mean"
        self._asked = asked
        self._settings = settings
        self._rounds: ElasticRounds | None = None
        self._engine: Engine | None = None
        self._has_finished = False
        self._pending: ElasticRound | None = None
        self.share = DataShare()
        self.host: Host | None = None
        self.last: ElasticRound | None = None

    def _note(self, pending: ElasticRound) -> None:
        self.last = pending
        statistics, plan = self.engine.statistics, pending.plan
        assert plan is not None
        statistics.members = len(plan.names)
        statistics.repaired += len(plan.drifted)

    @property
    def has_joined(self) -> bool:
        """Whether this worker takes part."""
        return self._rounds is not None

    @property
    def engine(self) -> Engine:
        """Whose connection it is; RuntimeError before it takes part."""
        if self._engine is None:
            raise RuntimeError("This worker does not take part: call join() before training.")
        return self._engine

    def _carry(self, pending: ElasticRound) -> ElasticRound:
        assert self._rounds is not None
        self._rounds.carry(pending)
        return pending

    # ------------------------------------------------------------------ rounds

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus]:
        """Return this worker's status: it is the only one in this job."""
        return [status]

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Raise RuntimeError: messages carry no status."""
        raise RuntimeError("The statuses of members are sent by themselves.")

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Raise RuntimeError: messages carry no status."""
        raise RuntimeError("The statuses of members are sent by themselves.")

    def send_status(self, status: WorkerStatus, label: str) -> PendingStatuses:
        """Begin a pending round with the status; its message follows by :meth:`start`.

        A pending round that stays begins then, not to take the processor from those who make
        messages.
        """
        pending = self._pending = ElasticRound(int(status.round_index), status)
        pending.is_overlapped = self.engine.settings.schedule.is_overlapped(pending.round_index)
        if not pending.is_overlapped:
            self._carry(pending)
        return statuses_of(pending, self.engine, label)

    def start(self, bucket: Bucket, round_index: int) -> Carried:
        """Give the pending round its message."""
        pending = self._pending
        assert pending is not None
        pending.values = position_of(self.engine, self.host, pending.round_index)
        pending.message = bucket.wire
        pending.is_sent.set()
        if pending.is_overlapped:
            self._carry(pending)
        return Carried(pending, self.engine, self._note)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """The mean, divided by the weights already; or the mix of each."""
        settings, alone = self._settings, WorkerGroup(0, 1)
        exchange = make_exchange(
            settings.algorithm, alone, Statistics(), settings.topology, settings.compression
        )
        return exchange.simulate(messages, round_index)

    # ----------------------------------------------------------------- members

    def join(self, engine: Engine) -> None:
        """Take part from now on.

        It gets the state of the run; a round that is under way is its own too, with weight 0. A
        worker that knows a later round from a checkpoint begins with that one instead.
        """
        self._engine, self._has_finished = engine, False
        self._rounds = _start_rounds(self._asked, engine, self.share)
        worker = engine.worker
        apply_saved_rounds(engine)
        told = resumed(worker.round_index) if worker.steps else NO_STATE
        pending = ElasticRound(told, WorkerStatus(IN_ROUND, NO_STATE, 0, weight=0.0, finite=1.0))
        pending.values = position_of(engine, self.host, worker.round_index)
        pending.values["steps_since_round"] = worker.steps_since_round
        pending.is_sent.set()
        try:
            self._carry(pending).wait()
            assert pending.plan is not None
            engine.statistics.members = len(pending.plan.names)
            if is_ahead(engine, pending):
                self._rounds.made = ""
                return
            if pending.state is not None:
                follow(engine, self.host, pending)
            if pending.received is not None:
                rounds = take_part(engine, pending, Carried(pending, engine, self._note))
                if not engine.settings.schedule.is_overlapped(worker.round_index):
                    rounds.apply()
                worker.round_index += 1
        except BaseException:
            self.close()
            raise

    def catch_up(self) -> None:
        """Wait for the round under way, and see whether the others have left this worker behind.

        It then goes on from the state of the run, without what it has made alone, and the round of
        the run is under way in place of its own, which may have been one of another fragment.
        """
        engine, pending = self.engine, self._pending
        if pending is None or all(rounds.pending is None for rounds in engine.fragments):
            return
        with WaitTimer(engine.statistics):
            pending.wait()
        if pending.state is None or pending.is_adopted:
            return
        assert pending.plan is not None
        begun = engine.worker.round_index - pending.round_index
        missed = self._missed(pending) if begun else 0
        for rounds in engine.fragments:
            rounds.drop_pending()
        follow(engine, self.host, pending, missed)
        take_part(engine, pending, Carried(pending, engine, self._note))
        engine.worker.round_index = pending.plan.round_index + begun

    def _missed(self, pending: ElasticRound) -> int:
        """Local steps from the begin of the run's round to where this worker is in its own one."""
        assert pending.state is not None
        theirs, own = pending.state.values["steps_under_way"], pending.values
        made = self.engine.worker.steps - own["steps"]
        return int(theirs if made >= own["steps_under_way"] else min(made, theirs))

    def finish(self) -> None:
        """Wait for no more members than there are: what is under way, or begins, is the last."""
        self._has_finished = True
        if self._rounds is not None:
            self._rounds.are_last = True

    def leave(self) -> None:
        """Take part no longer, when what is under way is over."""
        pending_rounds, self._rounds = self._rounds, None
        if pending_rounds is not None:
            pending_rounds.leave(self._has_finished)

    def close(self) -> None:
        """Take part no longer."""
        is_idle = self._pending is None or self._pending.is_over()
        if self._has_finished and is_idle:
            self.leave()
        elif self._rounds is not None:
            self._rounds.close()
            self._rounds = None


def _start_rounds(asked: Elastic, engine: Engine, share: DataShare) -> ElasticRounds:
    """Begin to carry pending rounds; the lighthouse need not be there before the first one."""
    name = f"{asked.name or socket.gethostname()}-{secrets.token_hex(4)}"
    lighthouse = Lighthouse(asked.lighthouse, name)
    groups = Groups(asked.host or address_towards(asked.lighthouse), asked.timeout_s)
    sums = engine.settings.algorithm.exchange == "mean"
    carrier = Summing(groups, engine) if sums else Mixing(groups, engine)
    pending_rounds = ElasticRounds(
        lighthouse,
        lambda: engine.worker.stop.requested is not None,
        groups,
        carrier,
        {**_describe(engine), "check_every": asked.check_every or 0, "num_samples": share.sizes},
        share=share,
        min_workers=asked.min_workers,
        timeout_s=asked.timeout_s,
        consistency=Consistency(
            engine.settings.algorithm.replicated and asked.check_every or 0,
            lambda: fingerprint(outer_state(engine)),
        ),
    )
    pending_rounds.start()
    return pending_rounds


def _describe(engine: Engine) -> dict[str, Any]:
    """What must be equal on all workers, as plain values."""
    settings = engine.settings.describe()
    told = {key: value for key, value in settings.items() if key not in _OWN_AFFAIRS}
    told["parameters"] = engine.worker.replica.layout.schema()
    return cast(dict[str, Any], json.loads(json.dumps(told, default=str)))
