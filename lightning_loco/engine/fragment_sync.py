"""The rounds of one fragment: pack, propose, encode, exchange, decode, update, unpack.

A round starts with :meth:`FragmentSync.start`, which sends the status of this worker, and with the
messages that :meth:`FragmentSync.begin` sends, bucket by bucket. It ends with
:meth:`FragmentSync.apply`. In a blocking round both happen before the next local step; in an
overlapped one, local steps lie in between.

Everything has been received before ``apply`` changes anything. So a round that fails while it waits
leaves the algorithm's state, and the parameters, as they were after ``begin``; in a blocking round
these are the parameters before the round. Two kinds of rounds change some buckets while others are
still to be sent or received: a blocking round that is larger than ``bucket_bytes``, and an
overlapped one whose message is computed while the round before is applied. A failure in between
marks the fragment as torn, and it is not saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms import Restart, RoundInfo, State
from lightning_loco.distributed.work import labelled
from lightning_loco.distributed.worker_status import (
    KnownStatuses,
    PendingStatuses,
    WorkerStatus,
    total_weight,
)
from lightning_loco.engine.buckets import Bucket, BucketChunk
from lightning_loco.engine.exchanges.exchange import Arrived, Exchange, Handle
from lightning_loco.engine.fragment_memory import FragmentMemory
from lightning_loco.engine.settings import PENDING_BUCKETS, RoundSettings
from lightning_loco.model.flat import are_finite


@dataclasses.dataclass
class PendingRound:
    """A round that has begun and is not applied yet.

    Attributes:
        index: Number of the round.
        valid: Whether this worker's message holds its own progress, with weight in a mean.
        began_at: Local steps of this worker when the round began.
        statuses: Statuses of all workers.
        handles: Handles of the buckets that have been sent, in order.
        received: Their results; None before :meth:`FragmentSync.wait`.
        is_overlapped: Whether local steps continue while it is pending.
        is_reduced: Whether ``received`` has been divided by the total weight, or combined, and
            decoded, and the residuals have been updated.
        finite: Whether this worker's parameters were finite when it began.
        began_at_s: When it began, in seconds of the engine's clock; None after a resume.
    """

    index: int
    valid: bool
    began_at: int
    statuses: PendingStatuses = dataclasses.field(default_factory=KnownStatuses)
    handles: list[Handle] = dataclasses.field(default_factory=list)
    received: list[Tensor] | None = None
    is_overlapped: bool = False
    is_reduced: bool = False
    finite: bool = True
    began_at_s: float | None = None

    def has_arrived(self) -> bool:
        """Whether everything has arrived; never waits, but calls workers at a sync point."""
        have_statuses_arrived = self.statuses.has_arrived()  # also if no bucket has: it calls them
        return all(handle.has_arrived() for handle in self.handles) and have_statuses_arrived

    def state_dict(self, statuses: Sequence[WorkerStatus]) -> dict[str, Any]:
        """Everything but the received messages, for a checkpoint, with the statuses to be kept."""
        names = ("index", "valid", "began_at", "finite")
        own = {name: getattr(self, name) for name in names}
        return {**own, "statuses": [status.numbers for status in statuses]}

    @classmethod
    def from_state(cls, saved: dict[str, Any], received: Sequence[Tensor]) -> PendingRound:
        """A round from a checkpoint, which is only to be applied.

        Args:
            saved: Result of :meth:`state_dict`.
            received: By bucket, reduced.
        """
        return cls(
            saved["index"],
            saved["valid"],
            saved["began_at"],
            KnownStatuses([WorkerStatus.of(numbers) for numbers in saved["statuses"]]),
            handles=[Arrived(tensor) for tensor in received],
            is_overlapped=True,
            is_reduced=True,
            finite=saved["finite"],
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
        is_torn: Whether a round has failed when some of its buckets had been applied, or before
            all ranks of the worker had its result.
        is_finite: Whether this worker's parameters are finite, as :meth:`prepare` has found; set it
            if other ranks of the worker have found otherwise.
    """

    def __init__(self, memory: FragmentMemory, settings: RoundSettings, exchange: Exchange) -> None:
        self.memory = memory
        self.pending: PendingRound | None = None
        self.began_at, self.fresh_at, self.applied_at = 0, 0, -math.inf
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self.is_torn = False
        self._algorithm = settings.algorithm
        self._merge_policy = settings.merge_policy or Restart()
        self._exchange = exchange
        compression = settings.compression
        self._averages_senders = compression is not None and compression.codec.averages_senders
        self._knows_workers = settings.algorithm.exchange == "mean" or bool(
            settings.algorithm.scalars(memory.state)
        )
        self._is_overlapped = settings.schedule.is_overlapped
        self._squares: list[Tensor] = []
        self._is_proposed = False
        self.is_finite = True

    @property
    def state(self) -> State:
        """The algorithm's state."""
        return self.memory.state

    # ----------------------------------------------------------- before a round

    def prepare(self, index: int) -> bool:
        """Compute the messages locally if possible; return whether the parameters are finite.

        If every bucket has its own memory and no round is pending, the messages are computed here;
        the sums of their chunks show whether all values are finite. Otherwise the parameters are
        read for that.

        Args:
            index: Number of the round.
        """
        self._make_writable()
        memory, sums = self.memory, [math.nan]
        self._is_proposed = memory.holds_all and self.pending is None
        if self._is_proposed:
            with labelled("loco/propose"):
                for chunk, total in zip(memory.chunks, memory.sums.unbind(), strict=True):
                    self._propose_local(chunk, chunk.message, RoundInfo(index), total)
            sums = memory.sums.tolist()
        self.is_finite = all(map(math.isfinite, sums)) or are_finite(
            [chunk.params for chunk in memory.chunks]
        )
        return self.is_finite

    def _make_writable(self) -> None:
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
        if self.pending is not None:
            self.pending.finite = False

    # ------------------------------------------------------- a round: the start

    def start(
        self, index: int, began_at: int, valid: bool, status: WorkerStatus, label: str
    ) -> PendingRound:
        """Send this worker's status, with the first bucket if the exchange carries it.

        Args:
            index: Number of the round.
            began_at: Local steps of this worker.
            valid: Whether it has its own progress.
            status: To send.
            label: Name of the round in messages.
        """
        exchange, pending = self._exchange, PendingRound(index, valid, began_at)
        if exchange.carries_status:
            bucket = self.memory.buckets[0]
            exchange.write_status(bucket, status, label)
            handle = self._propose_and_send(bucket, pending)
            pending.handles.append(handle)
            pending.statuses = exchange.read_statuses(bucket, handle, status, label)
        else:
            pending.statuses = exchange.send_status(status, label)
        return pending

    def make_in_turn(self, pending: PendingRound) -> None:
        """Send the other buckets, and apply each before the memory of a later one is needed.

        For a blocking round whose buckets share memory.
        """
        sent, waiting = iter(pending.handles), deque[tuple[Bucket, Handle]]()
        for bucket in self.memory.buckets:
            if len(waiting) == PENDING_BUCKETS:
                self._apply_bucket(pending, *waiting.popleft())
            handle = next(sent, None) or self._propose_and_send(bucket, pending)
            waiting.append((bucket, handle))
        while waiting:
            self._apply_bucket(pending, *waiting.popleft())
        self._finish()

    def begin(self, pending: PendingRound, is_overlapped: bool = True) -> bool:
        """Send the other buckets, and apply the round before, if one is pending.

        Returns whether that has changed parameters.

        With a merge policy that keeps progress, the round before is applied first. Otherwise the
        new message must hold the local steps taken since that round began, so the message of each
        chunk is computed right before the result of that round overwrites it.
        """
        before = self.pending
        pending.is_overlapped, pending.finite = is_overlapped, self.is_finite
        if before is not None and not self._merge_policy.keeps_progress:
            self._apply(before, pending.began_at, True, pending)
            return True
        if before is not None:
            self._apply(before, pending.began_at, pending.finite)
        for bucket in self.memory.buckets[len(pending.handles) :]:
            pending.handles.append(self._propose_and_send(bucket, pending))
        if self.memory.has_uncut_state:
            self.memory.take_back_state()
        restarts = self._restarts(pending)
        self.pending = pending
        return restarts or before is not None

    def _restarts(self, pending: PendingRound) -> bool:
        """Whether local steps continue from other parameters once a message is sent."""
        keeps_progress = self._merge_policy.keeps_progress and self.is_finite
        is_first = self.pending is None and not keeps_progress
        return is_first and self._is_overlapped(pending.index)

    def _propose_and_send(self, bucket: Bucket, pending: PendingRound) -> Handle:
        info = RoundInfo(pending.index)
        if not (pending.valid and self._is_proposed):
            with labelled("loco/propose"):
                for chunk in bucket.chunks:
                    self._propose(chunk, chunk.message, info, pending.valid)
        if self._restarts(pending):
            for chunk in bucket.chunks:
                chunk.restart(info)
        return self._send(bucket, pending.index)

    def _propose(self, chunk: BucketChunk, into: Tensor, info: RoundInfo, valid: bool) -> None:
        """Compute the message of a chunk; without valid progress, of the round's start."""
        is_weighted = self._exchange.is_weighted
        if valid or (self.is_finite and not is_weighted):
            self._propose_local(chunk, into, info)
            return
        if chunk.sent_params is not None and self.is_finite:
            chunk.pack_exact(chunk.sent_params)
        if is_weighted and chunk.is_partial and not self.is_finite:
            raise RuntimeError(
                "The parameters hold NaN or infinity. This worker receives only a part of the "
                f"others' parameters with {type(self._algorithm).__name__}, so it cannot recover. "
                "Lower the learning rate, and go back to the last checkpoint."
            )
        if is_weighted:
            into.zero_()
        elif (start := chunk.round_start()) is not None:
            packed = chunk.scratch if chunk.is_partial else into
            chunk.propose(packed.copy_(start), into, info)
        else:
            raise RuntimeError(
                "The parameters hold NaN or infinity, and the algorithm does not remember where "
                "the round began. Lower the learning rate, or go back to the last checkpoint."
            )

    def _propose_local(
        self, chunk: BucketChunk, into: Tensor, info: RoundInfo, total: Tensor | None = None
    ) -> None:
        packed = chunk.scratch if chunk.is_partial else into
        chunk.pack_exact(packed)
        if total is not None:
            torch.sum(packed, 0, out=total)
        if chunk.sent_params is not None:
            chunk.sent_params.copy_(packed)
        chunk.propose(packed, into, info)

    def _send(self, bucket: Bucket, index: int) -> Handle:
        reach("before sending")
        handle = self._exchange.start(bucket, index)
        reach("after sending")
        return handle

    # --------------------------------------------------------- a round: the end

    def apply(self, steps: int) -> None:
        """Wait for the pending round, if any, and apply its result as a whole, or not at all.

        Args:
            steps: Local steps of this worker so far.
        """
        if self.pending is not None:
            self._make_writable()
            self._apply(self.pending, steps, True)

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
        return self.pending is not None and self.pending.received is None

    def _apply(
        self,
        pending: PendingRound,
        steps: int,
        keeps_local: bool,
        following: PendingRound | None = None,
    ) -> None:
        """Apply a pending round; the messages of a following one are computed right before.

        Args:
            pending: The round.
            steps: Local steps of this worker so far.
            keeps_local: Whether the local parameters may enter the merge policy.
            following: A round that begins at the same time.
        """
        received, statuses = self._receive(pending)
        info = self._info(pending.index, statuses, steps - pending.began_at)
        self._commit()
        for bucket, handle in zip(self.memory.buckets, pending.handles, strict=True):
            bucket.keep_lost(None if pending.is_reduced else handle.lost, pending.valid)
        for bucket, whole in zip(self.memory.buckets, received, strict=True):
            with labelled("loco/apply"):
                for chunk, part in self._reduced(pending, bucket, whole, info):
                    next_message = None
                    if following is not None:
                        next_message = chunk.scratch
                        self._propose(
                            chunk, next_message, RoundInfo(following.index), following.valid
                        )
                    self._apply_chunk(pending, chunk, part, info, keeps_local, next_message)
                    if following is not None:
                        chunk.message.copy_(chunk.scratch)
            if following is not None:
                following.handles.append(self._send(bucket, following.index))
        for handle in pending.handles:
            handle.release()
        self.pending = following
        self._finish()

    def _apply_bucket(self, pending: PendingRound, bucket: Bucket, handle: Handle) -> None:
        info = self._info(pending.index, self._statuses(pending), age=0)
        with labelled("loco/exchange"):
            received = self._wait_for(handle)
        self._commit()
        bucket.keep_lost(handle.lost, pending.valid)
        with labelled("loco/apply"):
            for chunk, part in self._reduced(pending, bucket, received, info):
                self._apply_chunk(pending, chunk, part, info, True, None)
        handle.release()

    def _receive(self, pending: PendingRound) -> tuple[list[Tensor], list[WorkerStatus]]:
        with labelled("loco/exchange"):
            # Statuses first: waiting for them calls workers that are at a sync point.
            statuses = self._statuses(pending)
            if pending.received is None:
                pending.received = [self._wait_for(handle) for handle in pending.handles]
            return pending.received, statuses

    def _wait_for(self, handle: Handle) -> Tensor:
        received = handle.wait()
        reach("after receiving")
        return received

    def _statuses(self, pending: PendingRound) -> list[WorkerStatus]:
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

    def _commit(self) -> None:
        """Mark the fragment as torn until the round is applied; everything has been received."""
        reach("outer step")
        self.is_torn = True

    def _reduced(
        self, pending: PendingRound, bucket: Bucket, received: Tensor, info: RoundInfo
    ) -> Iterator[tuple[BucketChunk, Tensor]]:
        """Yield each chunk with the mean, or the algorithm's combination of all messages."""
        weight = 1.0
        if self._exchange.is_weighted and not pending.is_reduced:
            total = total_weight(info.weights, pending.statuses.label)
            weight = 1.0 if self._averages_senders else total
        ageless = dataclasses.replace(info, ages=())  # a checkpoint combines before the end
        for chunk, part in bucket.split(received):
            if self._algorithm.gathers and not pending.is_reduced:
                yield chunk, chunk.combine(part, ageless)
            else:
                yield chunk, part if weight == 1 else part.div_(weight)

    def _apply_chunk(
        self,
        pending: PendingRound,
        chunk: BucketChunk,
        received: Tensor,
        info: RoundInfo,
        keeps_local: bool,
        next_message: Tensor | None,
    ) -> None:
        if not pending.is_reduced:
            chunk.decode(received)
        chunk.record_received(received)
        if self.measure_gradient:
            self._measure_gradient(chunk, received)
        result = chunk.update(received, info, next_message)
        is_merged = pending.is_overlapped and keeps_local and pending.finite
        if is_merged and self._merge_policy.keeps_progress:
            chunk.pack_exact(chunk.scratch)
            result = self._merge_policy.merge(result, chunk.scratch, chunk.sent_params)
        result = chunk.local_start(result)
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

    def _finish(self) -> None:
        self.memory.take_back_state()
        self.is_torn = False
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []

    # -------------------------------------------------------------- checkpoints

    def check_whole(self) -> None:
        """Raise RuntimeError if a round has failed while it was being applied."""
        if self.is_torn:
            raise RuntimeError(
                "A round has failed while it was being applied, so the parameters are half those "
                "of before. Go back to the last checkpoint."
            )

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the algorithm's state with the received messages, and this worker's own state.

        RuntimeError as :meth:`check_whole`.
        """
        self.check_whole()
        memory, received, pending = self.memory, None, None
        if self.pending is not None:
            received = self._received_and_reduced(self.pending)
            pending = self.pending.state_dict(self._statuses(self.pending))
            if not self._exchange.is_weighted:
                pending["messages"] = memory.gather([bucket.message for bucket in memory.buckets])
        shared = {"state": dict(memory.state), "received": received}
        return shared, {"pending": pending, **memory.state_dict()}

    def _received_and_reduced(self, pending: PendingRound) -> Tensor:
        """The result of a pending round, as it is applied later."""
        received, statuses = self._receive(pending)
        if not pending.is_reduced:
            info = self._info(pending.index, statuses, age=0)
            for bucket, handle in zip(self.memory.buckets, pending.handles, strict=True):
                bucket.keep_lost(handle.lost, pending.valid)
            for index, bucket in enumerate(self.memory.buckets):
                parts = []
                for chunk, part in self._reduced(pending, bucket, received[index], info):
                    chunk.decode(part)
                    parts.append(part)
                if self._algorithm.gathers:
                    received[index] = torch.cat(parts)
            pending.is_reduced = True
        return self.memory.gather(received)

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
        self.pending = PendingRound.from_state(pending, received)

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
        statuses = [WorkerStatus.of(numbers) for numbers in pending["statuses"]]
        info = self._info(pending["index"], statuses, max(0, steps - pending["began_at"]))
        for chunk, part, message in zip(memory.chunks, received, messages, strict=True):
            local = torch.empty_like(part)
            chunk.pack_exact(local)
            before = chunk.round_start()
            if sent_params is not None:
                before = sent_params[chunk.params.start : chunk.params.stop].to(local)
            moved = None if before is None else local - before
            result = algorithm.update(message, part, chunk.state, chunk.info_of(info))
            is_sound = moved is not None and bool(torch.isfinite(moved).all())
            chunk.unpack(moved.add_(result) if moved is not None and is_sound else result)
        if memory.has_uncut_state:
            memory.take_back_state()
