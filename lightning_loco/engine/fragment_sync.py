"""A round of one fragment: propose, send, receive, agree on who counts, apply.

A round has three entries, all of them on one path:

- :meth:`FragmentSync.apply` only ends the pending round.
- :meth:`FragmentSync.begin` sends the status of this worker, and :meth:`FragmentSync.run` the
  messages, bucket by bucket. A blocking round is applied at once, an overlapped one later.
- If workers at a sync point have sent their statuses already, :meth:`FragmentSync.begin` is left
  out.

If a worker is lost, a round whose buckets all have memory of their own has changed nothing before
everything has arrived: the algorithm's state and the parameters are those with which the messages
were sent. Two kinds of rounds change some buckets while others are still to be sent or received: a
blocking round that is larger than ``bucket_bytes``, and an overlapped one whose message is computed
while the round before is applied. A failure in between leaves the fragment torn, and it is not
saved.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms import Restart, RoundInfo, State
from lightning_loco.algorithms.persistence import UNKNOWN, Persistence
from lightning_loco.distributed.worker_status import (
    KnownStatuses,
    PendingStatuses,
    WorkerStatus,
    total_weight,
)
from lightning_loco.engine.buckets import BucketChunk
from lightning_loco.engine.exchanges.exchange import Exchange, Handle
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.settings import PENDING_BUCKETS, RoundSettings
from lightning_loco.model.flat import are_finite

HasArrived = Callable[[], bool]
"""Returns whether something has arrived; never waits."""


class Stage(enum.Enum):
    """How far a round has come.

    Attributes:
        SENT: It has begun, and its results are on their way.
        RECEIVED: All results are in the host's or the device's memory; nothing has changed.
        COMBINED: Sums have been divided by the total weight, or the messages of all combined, and
            the residuals have been updated, as for a checkpoint.
    """

    SENT = "sent"
    RECEIVED = "received"
    COMBINED = "combined"


@dataclasses.dataclass(eq=False)
class Round:
    """A round that has begun and is not applied yet.

    Attributes:
        fragment: The fragment whose parameters it exchanges.
        index: Number of the round.
        began_at: Local steps of this worker when the round began.
        weight: Weight of this worker's message in a mean; 0 if it does not hold its own progress.
        finite: Whether local steps taken since it began may be kept: whether this worker's
            parameters are finite.
        divisor: The total weight, by which a received sum is divided; 1 for other results.
        is_overlapped: Whether local steps continue while it is pending.
        restarts: Whether they continue from other parameters once its messages are sent.
        statuses: Statuses of all workers.
        handles: Handles of the buckets that have been sent, in order.
        received: Their results, from :attr:`Stage.RECEIVED` on.
        stage: How far it has come.
        began_at_s: When it began, in seconds of the engine's clock; None after a resume.
    """

    fragment: FragmentSync
    index: int
    began_at: int
    weight: float
    finite: bool = True
    is_overlapped: bool = False
    restarts: bool = False
    statuses: PendingStatuses = dataclasses.field(default_factory=KnownStatuses)
    handles: list[Handle] = dataclasses.field(default_factory=list)
    received: list[Tensor] = dataclasses.field(default_factory=list)
    stage: Stage = Stage.SENT
    divisor: float = 1.0
    began_at_s: float | None = None

    def has_arrived(self) -> bool:
        """Whether everything has arrived; never waits, but calls workers at a sync point.

        :meth:`FragmentSync.has_received` leaves out statuses that the round does not need.
        """
        have_statuses_arrived = self.statuses.has_arrived()  # also if no bucket has: it calls them
        return all(handle.has_arrived() for handle in self.handles) and have_statuses_arrived

    def state_dict(self, statuses: Sequence[WorkerStatus]) -> dict[str, Any]:
        """Everything but the received messages, for a checkpoint, with the statuses to be kept."""
        names = ("index", "weight", "began_at", "finite")
        own = {name: getattr(self, name) for name in names}
        kept = [status._replace(step_s=0.0) for status in statuses]  # no times: equal runs differ
        return {**own, "statuses": [status.numbers for status in kept]}

    @classmethod
    def from_state(
        cls, fragment: FragmentSync, saved: dict[str, Any], received: Sequence[Tensor]
    ) -> Round:
        """A round from a checkpoint, which is only to be applied.

        Args:
            fragment: The fragment.
            saved: Result of :meth:`state_dict`.
            received: By bucket, combined.
        """
        return cls(
            fragment,
            saved["index"],
            saved["began_at"],
            saved["weight"],
            saved["finite"],
            is_overlapped=True,
            statuses=KnownStatuses([WorkerStatus.of(numbers) for numbers in saved["statuses"]]),
            received=list(received),
            stage=Stage.COMBINED,
        )


class FragmentSync:
    """The rounds of one fragment on one worker.

    Args:
        memory: The fragment's parameters, buckets and state.
        settings: What to compute and how; prepared.
        exchange: How messages move.

    Attributes:
        pending: The round that has begun and is not applied yet, or None.
        began_at: Local steps of this worker when the last round began.
        fresh_at: Local steps from which progress counts: ``began_at``, or later if the parameters
            were replaced by the parameters of another worker.
        applied_at: When a pending round was applied last, in seconds of the engine's clock.
        measure_gradient: Whether rounds measure the norm of the outer gradient.
        gradient_norm: Norm of the outer gradient in the last round.
        gradient_products: Of the last two outer gradients; unknown unless both were measured.
        is_torn: Whether a round is being applied or shared with the other ranks of the worker, or
            has failed while it was. Some parameters may then be new and others old.
        is_finite: Whether this worker's parameters are finite, as :meth:`prepare` has found; set it
            if other ranks of the worker have found otherwise.
    """

    def __init__(self, memory: FragmentMemory, settings: RoundSettings, exchange: Exchange) -> None:
        self.memory = memory
        self.pending: Round | None = None
        self.began_at, self.fresh_at, self.applied_at = 0, 0, -math.inf
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self.gradient_products = UNKNOWN
        self.is_torn = False
        self.is_finite = True
        self._algorithm = settings.algorithm
        self._merge_policy = settings.merge_policy or Restart()
        self._keeps_progress = self._merge_policy.keeps_progress
        self._exchange = exchange
        self._schedule = settings.schedule
        self._compression = compression = settings.compression
        self._is_partial, self._gathers = settings.is_partial, settings.algorithm.gathers
        averages_senders = compression is not None and compression.codec.averages_senders
        self._divides = exchange.is_weighted and not (self._gathers or averages_senders)
        self._has_scalars = bool(settings.algorithm.scalars(memory.state))
        self._knows_workers = settings.algorithm.exchange == "mean" or self._has_scalars
        self._squares: list[Tensor] = []
        self._persistence = Persistence(memory.layout.numel)
        self._is_proposed = False

    @property
    def state(self) -> State:
        """The algorithm's state."""
        return self.memory.state

    def scalars(self) -> tuple[float, ...]:
        """The algorithm's own numbers, which this worker sends with its status."""
        if not self._has_scalars:
            return ()
        return tuple(map(float, self._algorithm.scalars(self.memory.state)))

    # ----------------------------------------------------------- before a round

    def prepare(self, index: int) -> bool:
        """Compute the messages locally if possible; return whether the parameters are finite.

        If every bucket has its own memory and no round is pending, the messages are computed here;
        the sums of their chunks show whether all values are finite. Otherwise the parameters are
        read for that.

        Args:
            index: Number of the round.
        """
        self.make_writable()
        memory, sums = self.memory, [math.nan]
        # A message that is pending, or that shares its memory with others, must not be overwritten.
        self._is_proposed = memory.holds_all and self.pending is None
        if self._is_proposed:
            with labelled("loco/propose"):
                for chunk, total in zip(memory.chunks, memory.sums.unbind(), strict=True):
                    self._propose_local(chunk, chunk.message, RoundInfo(index), total)
            sums = memory.sums.tolist()
        # A sum is not finite if a value is not; if none is, it may still overflow.
        self.is_finite = all(map(math.isfinite, sums)) or are_finite(
            [chunk.params for chunk in memory.chunks]
        )
        return self.is_finite

    def make_writable(self) -> None:
        """Let the parameters be read and written: a round does so before it begins and ends."""
        layout = self.memory.layout
        if layout.before_write is not None:
            layout.before_write()
        self.memory.refresh()

    def holds_finite_params(self) -> bool:
        """Whether the parameters are finite, without preparing a round."""
        self.memory.refresh()
        return are_finite([chunk.params for chunk in self.memory.chunks])

    def restore_start(self) -> None:
        """Go back to where the last round began, because parameters hold NaN or infinity.

        For fragments without a round now: one local step spreads NaN over all parameters, so a
        single fragment cannot remove it. The result of a pending round then replaces the
        parameters, and the local steps taken since are lost.
        """
        for chunk in self.memory.chunks:
            if (start := chunk.round_start()) is not None:
                chunk.unpack(start)
                if chunk.sent_params is not None:
                    chunk.sent_params.copy_(start)  # or its NaN would count as a rounding error
        if self.pending is not None:
            self.pending.finite = False

    # ----------------------------------------------------------------- a round

    def new_round(self, index: int, began_at: int, weight: float) -> Round:
        """Return the round that follows :meth:`prepare`; nothing has been sent yet.

        Args:
            index: Number of the round.
            began_at: Local steps of this worker.
            weight: Of its message; 0 without its own progress.
        """
        keeps_progress, is_overlapped = self._keeps_progress, self._schedule.is_overlapped(index)
        # With Restart(), local steps continue from the last result, which run writes. In the first
        # overlapped round there is none, so they restart from the start of the round. Parameters
        # that are not finite are replaced in any case.
        has_result = self.pending is not None and not keeps_progress
        restarts = is_overlapped and not has_result and not (keeps_progress and self.is_finite)
        return Round(self, index, began_at, weight, self.is_finite, is_overlapped, restarts)

    def begin(self, new: Round, status: WorkerStatus, label: str) -> None:
        """Send this worker's status, with the first bucket if the exchange carries it.

        Args:
            new: The round.
            status: To send.
            label: Name of the round in messages.
        """
        exchange, first = self._exchange, self.memory.buckets[0]
        if exchange.carries_status:
            exchange.write_status(first, status, label)
            self._send(new, 0)
            new.statuses = exchange.read_statuses(first, new.handles[0], status, label)
        else:
            new.statuses = exchange.send_status(status, label)

    def run(
        self, new: Round, on_received: Callable[[Round], Round] = lambda received: received
    ) -> Generator[HasArrived, None, Round]:
        """Send the messages of a round, and apply what ends now; yield a function before each wait.

        A blocking round ends now. When an overlapped one begins, the round before ends: first, if
        the merge policy keeps progress. Otherwise the new message must hold the local steps taken
        since that round began, so the message of each chunk is computed right before the result of
        that round overwrites it.

        Args:
            new: The round.
            on_received: Called when a blocking round has been received; returns the round to apply.

        Returns:
            The round, or the one that was applied in its place.
        """
        before, count = self.pending, len(self.memory.buckets)
        ended: tuple[Round, RoundInfo] | None = None
        if before is not None:
            before.finite = before.finite and self.is_finite  # a merge would keep the NaN
            yield self.has_received
            statuses = self._receive(before)
            info = self._info(before.index, statuses, new.began_at - before.began_at)
            if self._keeps_progress:
                self._apply(before, info)
            else:
                self._start_applying(before, info)
                ended = before, info
        # Without memory for all messages, each is applied before a later one needs its memory.
        slots = count if self.memory.holds_all else PENDING_BUCKETS
        for number in range(count):
            if number >= slots:
                self._apply_in_turn(new, number - slots)
            if number > 0 or not new.handles:  # the first may have carried the status
                self._send(new, number, ended)
        if ended is not None:
            self._finish(ended[0])
        elif self.memory.has_uncut_state:
            self.memory.take_back_state()
        if new.is_overlapped or self.memory.holds_all:
            # A blocking round, too: if it fails while it waits, drop_pending releases its handles.
            self.pending = new
        if new.is_overlapped:
            return new
        if self.memory.holds_all:
            yield self.has_received
            replaced = on_received(new)
            replaced.fragment.apply(new.began_at)
            return replaced
        for number in range(count - slots, count):
            self._apply_in_turn(new, number)
        self._finish()  # all handles have been released, each after its bucket
        return new

    def apply(self, steps: int) -> None:
        """Wait for the pending round, if any, and apply its result as a whole, or not at all.

        Args:
            steps: Local steps of this worker so far.
        """
        if (pending := self.pending) is not None:
            statuses = self._receive(pending)
            self._apply(pending, self._info(pending.index, statuses, steps - pending.began_at))

    def wait(self) -> None:
        """Wait for the result of the pending round, without applying it."""
        if self.pending is not None:
            self._receive(self.pending)

    def has_received(self) -> bool:
        """Whether :meth:`apply` has nothing to wait for."""
        pending = self.pending
        if pending is None:
            return True
        have_statuses_arrived = not self._knows_workers or pending.statuses.has_arrived()
        return have_statuses_arrived and all(handle.has_arrived() for handle in pending.handles)

    @property
    def is_receiving(self) -> bool:
        """Whether messages may still be on their way."""
        return self.pending is not None and self.pending.stage is Stage.SENT

    # ------------------------------------------------------------------ sending

    def _send(self, new: Round, number: int, ended: tuple[Round, RoundInfo] | None = None) -> None:
        """Compute and send a bucket, and apply a round that ends to the same chunks."""
        info, bucket, is_valid = RoundInfo(new.index), self.memory.buckets[number], new.weight > 0
        if ended is not None:
            with labelled("loco/apply"):
                whole = ended[0].received[number]
                for chunk, received in self._combined(ended[0], number, whole, ended[1]):
                    # Not into the message yet: its memory may hold what the round that ends reads.
                    self._propose(chunk, chunk.scratch, info, is_valid)
                    self._apply_chunk(ended[0], chunk, received, ended[1], chunk.scratch)
                    chunk.message.copy_(chunk.scratch)
        elif not (is_valid and self._is_proposed):
            with labelled("loco/propose"):
                for chunk in bucket.chunks:
                    self._propose(chunk, chunk.message, info, is_valid)
        for chunk in bucket.chunks if new.restarts else ():
            start = self._algorithm.on_send(chunk.message, None, chunk.state, chunk.info_of(info))
            if start is not None:
                chunk.unpack(start)
        if bucket.own_message is not None and self._exchange.is_weighted:
            bucket.own_message.copy_(bucket.message)  # else both are in the same memory
        if is_valid and self._compression is not None and self._compression.is_relative:
            # Only now: the round that has just ended may have replaced the reference.
            for chunk in bucket.chunks:
                self._compression.prepare_message(chunk.message, chunk.residual)
        reach("before sending")
        new.handles.append(self._exchange.start(bucket, new.index, new.weight))
        reach("after sending")

    def _propose(self, chunk: BucketChunk, into: Tensor, info: RoundInfo, valid: bool) -> None:
        """Compute the message of a chunk; without valid progress, of the round's start."""
        is_weighted = self._exchange.is_weighted
        if valid or (self.is_finite and not is_weighted):
            self._propose_local(chunk, into, info)
            return
        if chunk.sent_params is not None and self.is_finite:
            chunk.pack(chunk.sent_params)
        if is_weighted and self._is_partial and not self.is_finite:
            raise RuntimeError(
                "The parameters hold NaN or infinity. This worker receives only a part of the "
                f"others' parameters with {type(self._algorithm).__name__}, so it cannot recover. "
                "Lower the learning rate, and go back to the last checkpoint."
            )
        if is_weighted:  # nothing is added to the sum, and this worker has no weight
            into.zero_()
        elif (start := chunk.round_start()) is not None:
            packed = chunk.scratch if self._is_partial else into
            self._write_message(chunk, packed.copy_(start), into, info)
        else:
            raise RuntimeError(
                "The parameters hold NaN or infinity, and the algorithm does not remember where "
                "the round began. Lower the learning rate, or go back to the last checkpoint."
            )

    def _propose_local(
        self, chunk: BucketChunk, into: Tensor, info: RoundInfo, total: Tensor | None = None
    ) -> None:
        packed = chunk.scratch if self._is_partial else into
        chunk.pack(packed)
        if total is not None:
            torch.sum(packed, 0, out=total)
        if chunk.sent_params is not None:
            chunk.sent_params.copy_(packed)
        self._write_message(chunk, packed, into, info)

    def _write_message(
        self, chunk: BucketChunk, params: Tensor, into: Tensor, info: RoundInfo
    ) -> None:
        """Write the message that follows from ``params`` into ``into``; both may be the same."""
        reach("packing")
        message = self._algorithm.propose(params, chunk.state, chunk.info_of(info))
        if message is not into:
            if message.shape != into.shape:
                raise RuntimeError(
                    f"{type(self._algorithm).__name__}.propose has made a message of shape "
                    f"{tuple(message.shape)} for {len(chunk)} parameters, and message_length says "
                    f"{len(into)}."
                )
            into.copy_(message)
        if self._compression is not None and not self._compression.is_relative:
            self._compression.prepare_message(into, chunk.residual)

    # ---------------------------------------------------------------- applying

    def _receive(self, pending: Round) -> list[WorkerStatus]:
        """Wait for all results of a round, and return the statuses of all workers."""
        with labelled("loco/exchange"):
            # Statuses first: waiting for them calls workers that are at a sync point.
            statuses = self._statuses(pending)
            if pending.stage is Stage.SENT:
                pending.received = [self._wait_for(handle) for handle in pending.handles]
                pending.stage = Stage.RECEIVED
        return statuses

    def _wait_for(self, handle: Handle) -> Tensor:
        received = handle.wait()
        reach("after receiving")
        return received

    def _statuses(self, pending: Round) -> list[WorkerStatus]:
        """The statuses of all workers; none if a worker waits for its neighbours only."""
        return pending.statuses.wait() if self._knows_workers else []

    def _info(self, index: int, statuses: Sequence[WorkerStatus], age: float) -> RoundInfo:
        return RoundInfo(
            index,
            weights=tuple(status.weight for status in statuses),
            scalars=tuple(status.scalars for status in statuses),
            steps=tuple(status.steps for status in statuses),
            ages=(float(age),) * len(statuses),
        )

    def _apply(self, ended: Round, info: RoundInfo) -> None:
        """Apply a round that has been received."""
        self._start_applying(ended, info)
        for number in range(len(self.memory.buckets)):
            self._apply_bucket(ended, number, ended.received[number], info)
        self._finish(ended)

    def _apply_in_turn(self, ended: Round, number: int) -> None:
        """Wait for one bucket of a round, and apply it; nothing of it is kept."""
        info = self._info(ended.index, self._statuses(ended), age=0)
        handle = ended.handles.pop(0)  # which may hold the memory of what was received
        with labelled("loco/exchange"):
            received = self._wait_for(handle)
        self._mark_torn(ended, info)
        self._keep_lost(ended, number, handle)
        self._apply_bucket(ended, number, received, info)
        handle.release()

    def _start_applying(self, ended: Round, info: RoundInfo) -> None:
        """Begin to apply a round that has been received; the fragment is torn until its end."""
        self._mark_torn(ended, info)
        if ended.stage is Stage.RECEIVED:
            for number, handle in enumerate(ended.handles):
                self._keep_lost(ended, number, handle)

    def _mark_torn(self, ended: Round, info: RoundInfo) -> None:
        self._find_divisor(ended, info)  # before: without any weight nothing is changed
        reach("outer step")
        self.is_torn = True

    def _find_divisor(self, ended: Round, info: RoundInfo) -> None:
        """Set the divisor of a round; RuntimeError if no worker has weight."""
        if self._exchange.is_weighted and ended.stage is not Stage.COMBINED:
            if self._is_without_progress(ended, info):
                ended.divisor = 1.0
                return
            total = total_weight(info.weights, ended.statuses.label)
            ended.divisor = total if self._divides else 1.0

    def _is_without_progress(self, ended: Round, info: RoundInfo) -> bool:
        """Whether no worker has weight, although not all have NaN: those without made no steps.

        So it is if all others wait at a sync point and the one that runs the round has NaN, or if
        elastic members have all received the state while this round was about to begin. Their sum
        is a mean of zero, which leaves outer parameters to the momentum.
        """
        if any(info.weights) or self._algorithm.round_start(self.memory.state) is None:
            return False
        return any(status.finite == 1 for status in self._statuses(ended))

    def _keep_lost(self, ended: Round, number: int, handle: Handle) -> None:
        """Keep what compression has lost of a message for the next round, if that is wanted."""
        if self._compression is not None and (lost := handle.lost) is not None:
            for chunk, part in self.memory.buckets[number].split(lost):
                self._compression.update_residual(part, chunk.residual, ended.weight > 0)

    def _combined(
        self, ended: Round, number: int, received: Tensor, info: RoundInfo
    ) -> Iterator[tuple[BucketChunk, Tensor]]:
        """Yield each chunk with its mean, decoded, or the combination of all messages."""
        for chunk, part in self.memory.buckets[number].split(received):
            if ended.stage is Stage.COMBINED:
                yield chunk, part
                continue
            if self._gathers:
                # A checkpoint combines before the round ends, so without ages.
                ageless = dataclasses.replace(info, ages=())
                part = self._algorithm.combine(part, chunk.info_of(ageless))
            elif ended.divisor != 1:
                part.div_(ended.divisor)
            if self._compression is not None:
                self._compression.add_reference(part, chunk.residual)
            yield chunk, part

    def _apply_bucket(self, ended: Round, number: int, received: Tensor, info: RoundInfo) -> None:
        with labelled("loco/apply"):
            for chunk, part in self._combined(ended, number, received, info):
                self._apply_chunk(ended, chunk, part, info)

    def _apply_chunk(
        self,
        ended: Round,
        chunk: BucketChunk,
        received: Tensor,
        info: RoundInfo,
        next_message: Tensor | None = None,
    ) -> None:
        compression, info = self._compression, chunk.info_of(info)
        if compression is not None:
            compression.update_reference(received, chunk.residual)
        if self.measure_gradient:
            self._measure_gradient(chunk, received)
        if chunk.local is not None:
            chunk.pack(chunk.local)
        parts = chunk.local, chunk.own_message, received
        if next_message is None:
            result = self._algorithm.update(*parts, chunk.state, info)
        else:
            start = self._algorithm.on_send(next_message, parts, chunk.state, info)
            assert start is not None
            result = start
        if self._keeps_progress and ended.is_overlapped and ended.finite:
            chunk.pack(chunk.scratch)
            result = self._merge_policy.merge(result, chunk.scratch, chunk.sent_params)
        if compression is not None:
            result = compression.local_params(result, chunk.residual, out=chunk.scratch)
        chunk.unpack(result)
        if chunk.sent_params is not None and chunk.sent_params is not result:
            chunk.sent_params.copy_(result)

    def _measure_gradient(self, chunk: BucketChunk, received: Tensor) -> None:
        """Measure the mean pseudo-gradient, this worker's drift, or the change by averaging."""
        algorithm, gradient = self._algorithm, received
        if algorithm.sends_parameters:
            if chunk.sent_params is None:
                return
            gradient = received - chunk.sent_params
        elif algorithm.exchange == "neighbors":
            if (start := algorithm.round_start(chunk.state)) is None:
                return
            gradient = chunk.message - start
        self._squares.append(torch.linalg.vector_norm(gradient))
        if not self._is_partial:  # other elements in every round
            self._persistence.add(gradient)

    def _finish(self, ended: Round | None = None) -> None:
        """End a round that has been applied; release the memory of ``ended``."""
        for handle in ended.handles if ended is not None else ():
            handle.release()
        self.pending = None
        self.memory.add_up()
        self.memory.take_back_state()
        self.is_torn = False
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []
            self.gradient_products = self._persistence.end_round()

    # -------------------------------------------------------------- checkpoints

    def check_whole(self) -> None:
        """Raise RuntimeError if a round has failed while it was being applied."""
        if self.is_torn:
            raise RuntimeError(
                "A round has failed while it was being applied, so some parameters are new and "
                "some old. Go back to the last checkpoint."
            )

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the algorithm's state with the received messages, and this worker's own state.

        RuntimeError as :meth:`check_whole`.
        """
        self.check_whole()
        memory, received, pending = self.memory, None, None
        if self.pending is not None:
            received = self._received_and_combined(self.pending)
            pending = self.pending.state_dict(self._statuses(self.pending))
            if (messages := memory.gather_own_messages()) is not None:
                pending["messages"] = messages
        shared = {"state": dict(memory.state), "received": received}
        return shared, {"pending": pending, **memory.state_dict()}

    def _received_and_combined(self, pending: Round) -> Tensor:
        """The result of a pending round, as it is applied later."""
        info = self._info(pending.index, self._receive(pending), age=0)
        if pending.stage is not Stage.COMBINED:
            self._find_divisor(pending, info)
            for number, handle in enumerate(pending.handles):
                self._keep_lost(pending, number, handle)
                received = pending.received[number]
                parts = [part for _, part in self._combined(pending, number, received, info)]
                if self._gathers:
                    pending.received[number] = torch.cat(parts)
            pending.stage = Stage.COMBINED
        return self.memory.gather(pending.received)

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`."""
        memory, pending = self.memory, own["pending"]
        if self.pending is not None:
            self._receive(self.pending)
        for handle in self.drop_pending():
            handle.release()
        memory.load_state_dict(shared["state"], own)
        if pending is None:
            return
        if not memory.holds_all:
            raise ValueError("The checkpoint holds a pending round, but overlap is off.")
        received = memory.load_pending(shared["received"], pending.get("messages"))
        self.pending = Round.from_state(self, pending, received)

    def drop_pending(self) -> list[Handle]:
        """Forget the pending round; its handles are still to be released."""
        pending, self.pending = self.pending, None
        return [] if pending is None else pending.handles

    @torch.no_grad()
    def apply_saved(self, pending: dict[str, Any], steps: int) -> None:
        """Apply a pending round of a checkpoint where no round may be pending.

        The parameters move by as much as the result moves the start of the round. So the local
        steps taken since then are kept, and are in the message of the next round.

        Args:
            pending: Its state with ``"received"``, the own ``"messages"`` if the algorithm needs
                them, and the ``"sent_params"``, flat, or None.
            steps: Local steps of this worker so far.
        """
        memory, algorithm = self.memory, self._algorithm
        received, sent_params = memory.scatter(pending["received"]), pending["sent_params"]
        messages = memory.scatter(pending["messages"]) if "messages" in pending else received
        reads = algorithm.reads
        statuses = [WorkerStatus.of(numbers) for numbers in pending["statuses"]]
        info = self._info(pending["index"], statuses, max(0, steps - pending["began_at"]))
        for chunk, part, message in zip(memory.chunks, received, messages, strict=True):
            local = torch.empty_like(part)
            chunk.pack(local)
            before = chunk.round_start()
            if sent_params is not None:
                before = sent_params[chunk.params.start : chunk.params.stop].to(local)
            moved = None if before is None else local - before
            result = algorithm.update(
                local if "local" in reads else None,
                message if "message" in reads else None,
                part,
                chunk.state,
                chunk.info_of(info),
            )
            is_sound = moved is not None and bool(torch.isfinite(moved).all())
            chunk.unpack(moved.add_(result) if moved is not None and is_sound else result)
        memory.add_up()
        if memory.has_uncut_state:
            memory.take_back_state()


def labelled(name: str) -> AbstractContextManager[object]:
    """Return a ``record_function`` context if ``torch.profiler`` is active, else an empty one.

    Without a profiler, ``record_function`` would still cost more than packing a small tensor.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()
