"""The exchange of an engine with the other members: messages and statuses of rounds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import PendingStatuses, WorkerStatus, statuses_in
from lightning_loco.elastic.consistency import ConsistencyCheck, fingerprint
from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.lighthouse import Lighthouse, address_seen_by
from lightning_loco.elastic.member_connection import LoopPosition, MemberConnection
from lightning_loco.elastic.places import Places
from lightning_loco.elastic.recovery import outer_state, position_of
from lightning_loco.elastic.round_request import PendingRound, RoundRequest, RoundResult
from lightning_loco.elastic.rounds import RoundThread
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.exchange import Handle
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.model.ownership import Block

_MAY_DIFFER = ("sync_every", "bucket_bytes")
"""Settings that need not be equal on all members."""


class ElasticConnection(MemberConnection):
    """The exchange of one engine with the other members of an elastic run.

    A round of the engine calls :meth:`send_status` with its status, then :meth:`start` with its
    message. ``pending`` is the last round that was asked for, and ``last_round`` the last one whose
    result was received; None before the first one.

    ``check_every`` is 0 for no comparison; other keyword arguments as in
    :class:`lightning_loco.Elastic`.
    """

    is_weighted = True
    carries_status = False

    def __init__(
        self,
        settings: RoundSettings,
        group: WorkerGroup,
        *,
        lighthouse: str,
        min_workers: int,
        name: str,
        host: str | None,
        timeout_s: float,
        check_every: int,
    ) -> None:
        self.data_shard = DataShard(group.place, group.replica_size)
        # A rank may wait for the first one while that waits for the lighthouse.
        self._places = Places(group, group.timeout_s + timeout_s)
        self.loop: LoopPosition | None = None
        self.last_round: RoundResult | None = None
        self.pending: PendingRound | None = None
        self._settings = settings
        self._clock = group.clock
        self._lighthouse = lighthouse
        self._min_workers = min_workers
        self._name = name
        self._host = host
        self._timeout_s = timeout_s
        self._check_every = check_every
        self._engine: Engine | None = None
        self._rounds: RoundThread | None = None
        self._statuses: MemberStatuses | None = None
        self._has_finished = False

    @property
    def has_joined(self) -> bool:
        """Whether this worker takes part in rounds."""
        return self._rounds is not None

    @property
    def engine(self) -> Engine:
        """The connected engine; RuntimeError before :meth:`open`."""
        if self._engine is None:
            raise RuntimeError("This worker does not take part: call start() before training.")
        return self._engine

    # ------------------------------------------------------------------ join and leave

    def open(self, engine: Engine) -> None:
        """Start the round thread of an engine, for its first round or after :meth:`leave`."""
        self._engine, self._has_finished = engine, False
        self._rounds = self._start_rounds(engine)

    def _start_rounds(self, engine: Engine) -> RoundThread:
        """Start the round thread, which connects to the lighthouse in its first round."""
        algorithm, places = engine.settings.algorithm, self._places
        # A job that is started again is another member: it has the state of a checkpoint, and the
        # others may still wait for the one that it was.
        name = f"{self._name}-{secrets.token_hex(4)}"
        lighthouse = Lighthouse(self._lighthouse, places.gather(name)[0], clock=self._clock)
        group = MemberGroup(
            self._host or address_seen_by(self._lighthouse), self._timeout_s, clock=self._clock
        )
        run = {
            **_describe(engine),
            "shards": places.gather(_describe_shards(engine)),
            "check_every": self._check_every,
            # Members that read data of different lengths would divide different streams.
            "num_samples": self.data_shard.dataset_sizes,
        }
        # Seen by the round thread as soon as a signal comes, and not at the next local step.
        stop = engine.worker.stop

        def own_fingerprint() -> int:
            return fingerprint({"places": places.gather(fingerprint(outer_state(engine)))})

        rounds = RoundThread(
            lighthouse,
            places,
            lambda: stop.requested is not None or stop.is_seen,
            group,
            SumExchange(group, engine),
            run,
            data_shard=self.data_shard,
            min_workers=self._min_workers,
            timeout_s=self._timeout_s,
            consistency=ConsistencyCheck(
                self._check_every if algorithm.replicated else 0, own_fingerprint
            ),
            clock=self._clock,
        )
        rounds.start()
        return rounds

    def finish(self) -> None:
        """Announce that pending and later rounds are the last: they wait for no more members."""
        self._has_finished = True
        if self._rounds is not None:
            self._rounds.decisions.is_leaving = True

    def leave(self) -> None:
        """Leave the run after the pending round."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.leave(self._has_finished)

    def close(self) -> None:
        """Leave the run: at once, but regularly if all rounds are complete."""
        is_idle = self._statuses is None or self._statuses.has_arrived()
        if self._has_finished and is_idle:
            self.leave()
        elif self._rounds is not None:
            self._rounds.close()
            self._rounds = None
        # A rank may still wait for others in a pending round, and a group in use is aborted.
        self._places.close(has_failed=not is_idle)

    # ----------------------------------------------------------------------- one round

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus]:
        """Return this worker's status only: other members do not reach its sync points."""
        return [status]

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Raise RuntimeError: messages of members carry no status."""
        raise RuntimeError("Members send statuses by themselves.")

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Raise RuntimeError: messages of members carry no status."""
        raise RuntimeError("Members send statuses by themselves.")

    def send_status(self, status: WorkerStatus, label: str) -> PendingStatuses:
        """Begin a round with this worker's status, which is sent with its message."""
        self._statuses = MemberStatuses(status, self.engine.statistics, label)
        return self._statuses

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> RoundHandle:
        """Send the status and the message of the round that has begun."""
        assert self._statuses is not None
        # The position is read now, between two local steps, and goes to joining workers with the
        # state.
        request = RoundRequest(
            round_index,
            self._statuses.own,
            position_of(self.engine, self.loop, round_index),
            bucket.wire,
            self.engine.settings.schedule.is_overlapped(round_index),
        )
        self.pending = self._statuses.pending = self.submit(request)
        return self.handle_of(self.pending)

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Return the result of each worker: the weighted mean."""
        settings, alone = self._settings, WorkerGroup(0, 1)
        exchange = make_exchange(
            settings.algorithm, alone, Statistics(), None, settings.compression
        )
        return exchange.simulate(messages, round_index, weights)

    def submit(self, request: RoundRequest) -> PendingRound:
        """Let the round thread run a round."""
        assert self._rounds is not None
        self._rounds.submit(pending := PendingRound(request, self._clock))
        return pending

    def keep_own_state(self) -> None:
        """Let the next round be one with the state of a checkpoint, and not of this run."""
        assert self._rounds is not None
        self._rounds.decisions.last_group = ""

    def handle_of(self, pending: PendingRound) -> RoundHandle:
        """The handle of the message of a round."""
        return RoundHandle(pending, self.engine, self._record)

    def _record(self, result: RoundResult) -> None:
        """Record a round whose result was received."""
        last, self.last_round = self.last_round, result
        statistics = self.engine.statistics
        if last is not None and last.plan.names != result.plan.names:
            statistics.step_times.clear()  # the numbers are of other members
        statistics.members = len(result.plan.names)
        statistics.repaired += len(result.plan.drifted)


class MemberStatuses:
    """Statuses of all members, which are known when a round is complete.

    Attributes:
        own: The status that this worker sends.
        pending: The round; None before its message was sent.
    """

    def __init__(
        self,
        own: WorkerStatus,
        statistics: Statistics,
        label: str,
        pending: PendingRound | None = None,
    ) -> None:
        self.own, self.pending = own, pending
        self.label = label
        self._statistics = statistics
        self._statuses: list[WorkerStatus] | None = None

    @property
    def has_been_read(self) -> bool:
        """Whether :meth:`wait` has returned before."""
        return self._statuses is not None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self.pending is not None and self.pending.done()

    def wait(self) -> list[WorkerStatus]:
        """Wait until the round is complete, and return the statuses of its members."""
        if self._statuses is None:
            if self.pending is None:
                raise RuntimeError(f"The message of {self.label} was not sent.")
            with WaitTimer(self._statistics):
                statuses = self.pending.wait().statuses
            assert statuses is not None
            self._statuses = statuses_in(statuses)
        return self._statuses


class RoundHandle:
    """Handle of the exchange of a round; ``record`` is called once its result was received."""

    def __init__(
        self, pending: PendingRound, engine: Engine, record: Callable[[RoundResult], None]
    ) -> None:
        self._pending = pending
        self._engine = engine
        self._record = record

    @property
    def lost(self) -> Tensor | None:
        """What compression removed from the message, if there is error feedback."""
        residual = self._pending.result().residual
        return None if residual is None else residual.to(self._device)

    @property
    def _device(self) -> torch.device:
        return self._engine.worker.replica.layout.device

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self._pending.done()

    def wait(self) -> Tensor:
        """Wait for the sum of the messages, and return it."""
        statistics = self._engine.statistics
        with WaitTimer(statistics):
            result = self._pending.wait()
        self._record(result)
        assert result.received is not None
        statistics.bytes_sent += result.bytes_sent
        statistics.bytes_saved += result.bytes_saved
        # Members exchange in the host's memory.
        return result.received.to(self._device)

    def release(self) -> None:
        """Do nothing: the memory belongs to the round."""


def _describe(engine: Engine) -> dict[str, Any]:
    """Return the settings that must be equal on all members, as plain values."""
    settings = engine.settings.describe()
    run = {key: value for key, value in settings.items() if key not in _MAY_DIFFER}
    run["parameters"] = engine.worker.replica.layout.schema()
    run["ranks_per_worker"] = engine.worker.group.replica_size
    # As the others read it, to compare: tuples become lists, and objects their text.
    return cast(dict[str, Any], json.loads(json.dumps(run, default=str)))


def _describe_shards(engine: Engine) -> int:
    """Return a checksum of the parts of the parameters that this rank owns."""
    replica = engine.worker.replica
    blocks = [(name, Block.of(p)) for name, p in replica.parameters.items()]
    return schema_checksum([blocks, [[(s.start, s.stop) for s in f] for f in replica.fragments]])
