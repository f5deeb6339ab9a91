"""The rounds of one fragment: propose, send, land, bucket by bucket.

Three turns are all there is: :meth:`FragmentSync.make` begins and ends a round,
:meth:`FragmentSync.begin` leaves one under way, after the one before has landed or while it does,
:meth:`FragmentSync.apply` ends it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import Restart
from lightning_loco.distributed.work import labelled
from lightning_loco.distributed.worker_status import PendingStatuses, WorkerStatus
from lightning_loco.engine.buckets import Arrived, Bucket, Handle, Part
from lightning_loco.engine.exchanges.base import Exchange, send, wait_for
from lightning_loco.engine.fragment import Fragment
from lightning_loco.engine.settings import PENDING_BUCKETS, RoundSettings
from lightning_loco.fault_points import reach
from lightning_loco.parameters.flat import are_finite


@dataclasses.dataclass
class PendingRound:
    """Messages of one fragment under way, and what their landing needs to know.

    Attributes:
        index: Number of the round.
        statuses: What the workers tell with it.
        valid: Whether this worker's message is one of its own progress, with weight in a mean.
        finite: Whether its parameters were finite when it began.
        began_at: Local steps of this worker when it began.
        handles: The buckets under way, in order.
        received: What they have brought; None before it is here.
        stayed: Whether local steps were made while it was under way.
        told: The algorithm's own numbers of all workers; None before they are known.
        is_divided: Whether what has arrived is divided by the total weight already, and what was
            lost on the wire is taken care of.
    """

    index: int
    statuses: PendingStatuses
    valid: bool
    began_at: int
    handles: list[Handle] = dataclasses.field(default_factory=list)
    received: list[Tensor] | None = None
    was_overlapped: bool = False
    told: list[tuple[float, ...]] | None = None
    is_divided: bool = False
    finite: bool = True

    def has_arrived(self) -> bool:
        """Whether everything is here; never waits, and calls others who may not know of it."""
        are_statuses_here = (
            self.statuses.has_arrived()
        )  # whatever the handles say: this is the call
        return all(handle.has_arrived() for handle in self.handles) and are_statuses_here

    def state_dict(self) -> dict[str, Any]:
        """What to know of it besides what it brings."""
        return {
            name: getattr(self, name) for name in ("index", "valid", "began_at", "told", "finite")
        }

    @classmethod
    def arrived(cls, saved: dict[str, Any], received: Sequence[Tensor]) -> PendingRound:
        """A pending round of which only the landing is left, as from a checkpoint.

        ``received`` has arrived, bucket by bucket, and is divided by the total weight.
        """
        statuses = PendingStatuses(
            lambda: torch.zeros(0, WorkerStatus.width(0)), f"round {saved['index']}"
        )
        told = saved["told"] and [tuple(numbers) for numbers in saved["told"]]
        pending = cls(saved["index"], statuses, saved["valid"], saved["began_at"], told=told)
        pending.finite = saved["finite"]
        pending.handles = [Arrived(tensor) for tensor in received]
        pending.was_overlapped = pending.is_divided = True
        return pending


class FragmentSync:
    """All that one fragment of one worker exchanges.

    Where every message has a place of its own, everything has arrived before anything changes: a
    round that fails leaves parameters and state as they were. A blocking round that is larger than
    the bucket lands in pieces, and one that fails in between is marked as torn.

    Args:
        fragment: The parameters, their memory and their state.
        settings: What to compute and how; prepared.
        exchange: How messages move.

    Attributes:
        pending: The round under way, or None.
        began_at: Local steps of this worker when the last round began.
        fresh_at: Local steps after which this worker has something to tell; those of ``began_at``,
            unless its parameters have come from another worker since.
        applied_at: When a pending round ended last, by the monotonic clock in seconds.
        measure_gradient: Whether rounds measure the norm of the outer gradient.
        gradient_norm: That of the last round.
        is_torn: Whether a round has failed after some of its parts had landed.
    """

    def __init__(self, fragment: Fragment, settings: RoundSettings, exchange: Exchange) -> None:
        self.fragment = fragment
        self.pending: PendingRound | None = None
        self.began_at, self.fresh_at, self.applied_at = 0, 0, -math.inf
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self.is_torn = False
        self._algorithm = settings.algorithm
        self._merge_policy = settings.merge_policy or Restart()
        self._exchange = exchange
        self._is_overlapped = settings.schedule.is_overlapped
        self._squares: list[Tensor] = []
        self._is_proposed = False
        self._is_finite = True
        self._first: Handle | None = None

    def look(self) -> bool:
        """Prepare a round as far as possible alone, and say whether the parameters are finite.

        Messages that have a place which is free are made here: then a look at the packed values,
        still in the cache, replaces one at the parameters.
        """
        self._make_ready()
        fragment, sums = self.fragment, [math.nan]
        self._is_proposed = fragment.holds and self.pending is None
        if self._is_proposed:
            with labelled("loco/propose"):
                for part, total in zip(fragment.parts, fragment.sums.unbind(), strict=True):
                    self._propose_local(part, part.message, total)
            sums = fragment.sums.tolist()
        self._is_finite = all(map(math.isfinite, sums)) or are_finite(
            [p.chunk for p in fragment.parts]
        )
        return self._is_finite

    def _make_ready(self) -> None:
        layout = self.fragment.layout
        if layout.before_write is not None:
            layout.before_write()
        self._tie()

    def _tie(self) -> None:
        if self.fragment.layout.chunks() is not self.fragment.tied_to:
            self.fragment.tie()

    def go_back(self) -> None:
        """Go on from where the last round began, if the parameters hold NaN or infinity.

        For fragments that have no round now: one local step spreads NaN over all parameters, so
        that a fragment alone cannot get rid of it. Of a pending round the result is
        taken as it is.
        """
        self._tie()
        if are_finite([part.chunk for part in self.fragment.parts]):
            return
        for part in self.fragment.parts:
            if (start := part.start()) is not None:
                part.unpack(start)
        if self.pending is not None:
            self.pending.finite = False

    def _propose_local(self, part: Part, into: Tensor, total: Tensor | None = None) -> None:
        part.read_local(into)
        if total is not None:
            torch.sum(into, 0, out=total)
        if part.sent_params is not None:
            part.sent_params.copy_(into)
        part.propose(into)

    def _propose(self, part: Part, into: Tensor, valid: bool) -> None:
        """Make the message of a part; without valid parameters, that of where the round began."""
        is_weighted = self._exchange.is_weighted
        if valid or (self._is_finite and not is_weighted):
            self._propose_local(part, into)
            return
        if part.sent_params is not None and self._is_finite:
            part.read_local(part.sent_params)
        if is_weighted:
            into.zero_()
        elif (start := part.start()) is not None:
            part.propose(into.copy_(start))
        else:
            raise RuntimeError(
                "The parameters hold NaN or infinity, and the algorithm does not remember where "
                "the round began. Lower the learning rate, or go back to the last checkpoint."
            )

    def _send(self, bucket: Bucket, index: int, valid: bool) -> Handle:
        if not (valid and self._is_proposed):
            with labelled("loco/propose"):
                for part in bucket.parts:
                    self._propose(part, part.message, valid)
        goes_on = self.pending is not None or (
            self._merge_policy.keeps_progress and self._is_finite
        )
        for part in bucket.parts if self._is_overlapped(index) and not goes_on else ():
            part.begin_again()
        return send(self._exchange, bucket, index)

    def send_first(self, index: int, valid: bool) -> Handle:
        """Send the first bucket ahead, because the workers' statuses ride behind it."""
        self._first = self._send(self.fragment.buckets[0], index, valid)
        return self._first

    def _send_next(self, bucket: Bucket, pending: PendingRound) -> Handle:
        first, self._first = self._first, None
        return first or self._send(bucket, pending.index, pending.valid)

    def make(self, pending: PendingRound) -> None:
        """Send all messages and apply what comes back, before the next local step."""
        if self.fragment.holds:
            self.begin(pending, is_overlapped=False)
            self.apply()
            return
        waiting: deque[tuple[Bucket, Handle]] = deque()
        for bucket in self.fragment.buckets:
            if len(waiting) == PENDING_BUCKETS:
                self._apply_bucket(pending, *waiting.popleft())
            waiting.append((bucket, self._send_next(bucket, pending)))
        while waiting:
            self._apply_bucket(pending, *waiting.popleft())
        self._finish()

    def begin(self, pending: PendingRound, is_overlapped: bool = True) -> None:
        """Send all messages, and apply the round before, which is pending."""
        before, pending.was_overlapped, pending.finite = (
            self.pending,
            is_overlapped,
            self._is_finite,
        )
        if before is not None and not self._merge_policy.keeps_progress:
            self._apply(before, True, pending)
            return
        if before is not None:
            self._apply(before, pending.finite)
        pending.handles = [self._send_next(bucket, pending) for bucket in self.fragment.buckets]
        if self.fragment.has_uncut_state:
            self.fragment.take_back_state()
        self.pending = pending

    def apply(self) -> None:
        """Wait for the pending round, if any, and apply all that it brings, or nothing."""
        if self.pending is not None:
            self._make_ready()
            self._apply(self.pending, True)

    @property
    def is_under_way(self) -> bool:
        """Whether messages may still be on their way."""
        return self.pending is not None and self.pending.received is None

    def wait(self) -> None:
        """Wait for all that the pending round brings, without applying it."""
        if self.pending is not None:
            self._receive(self.pending)

    def _apply(
        self, pending: PendingRound, valid: bool, successor: PendingRound | None = None
    ) -> None:
        """Apply a pending round; the successor's message is made right before, part by part."""
        received, weight = self._receive(pending)
        self._commit(pending, self.fragment.parts)
        self._keep_lost(pending)
        for bucket, whole in zip(self.fragment.buckets, received, strict=True):
            with labelled("loco/apply"):
                for part, share in bucket.split(whole, weight):
                    if successor is not None:
                        self._propose(part, part.scratch, successor.valid)
                    leaving = None if successor is None else part.scratch
                    self._apply_chunk(pending, part, share, valid, leaving)
                    if successor is not None:
                        part.message.copy_(part.scratch)
            if successor is not None:
                successor.handles.append(send(self._exchange, bucket, successor.index))
        for handle in pending.handles:
            handle.release()
        self.pending = successor
        self._finish()

    def _apply_bucket(self, pending: PendingRound, bucket: Bucket, handle: Handle) -> None:
        weight = self._weight(pending)
        with labelled("loco/exchange"):
            received = wait_for(handle)
        self._commit(pending, bucket.parts)
        bucket.keep(handle.lost, pending.valid)
        with labelled("loco/apply"):
            for part, share in bucket.split(received, weight):
                self._apply_chunk(pending, part, share, True, None)
        handle.release()

    def _receive(self, pending: PendingRound) -> tuple[list[Tensor], float]:
        with labelled("loco/exchange"):
            weight = self._weight(
                pending
            )  # first, because it calls those who may be at a sync point
            if pending.received is None:
                pending.received = [wait_for(handle) for handle in pending.handles]
            return pending.received, weight

    def _weight(self, pending: PendingRound) -> float:
        """What sums are to be divided by; waits for the statuses only if they matter."""
        if self._algorithm.num_scalars and pending.told is None:
            pending.told = [status.scalars for status in pending.statuses.wait()]
        is_sum = self._exchange.is_weighted and not pending.is_divided
        return pending.statuses.total_weight() if is_sum else 1.0

    def _commit(self, pending: PendingRound, parts: list[Part]) -> None:
        """From here on the round counts: these parts wait for no other worker any more."""
        reach("outer step")
        self.is_torn = True
        for part in parts if pending.told is not None else ():
            self._algorithm.receive_scalars(pending.told or (), part.state)

    def _keep_lost(self, pending: PendingRound) -> None:
        for bucket, handle in zip(self.fragment.buckets, pending.handles, strict=True):
            bucket.keep(None if pending.is_divided else handle.lost, pending.valid)

    def _apply_chunk(
        self,
        pending: PendingRound,
        part: Part,
        received: Tensor,
        valid: bool,
        leaving: Tensor | None,
    ) -> None:
        if not pending.is_divided:
            part.make_absolute(received)
        part.note_received(received)
        if self.measure_gradient:
            gradient = self._algorithm.outer_gradient(part.message, received, part.state)
            if gradient is None and part.sent_params is not None:
                gradient = received - part.sent_params
            if gradient is not None:
                self._squares.append(torch.linalg.vector_norm(gradient))
        result = part.end(received, leaving)
        if (
            pending.was_overlapped
            and valid
            and pending.finite
            and self._merge_policy.keeps_progress
        ):
            part.read_local(part.scratch)
            result = self._merge_policy.merge(result, part.scratch, part.sent_params)
        result = part.begin(result)
        part.unpack(result)
        if part.sent_params is not None and part.sent_params is not result:
            part.sent_params.copy_(result)

    def _finish(self) -> None:
        fragment = self.fragment
        if fragment.has_uncut_state or len(fragment.state) != len(fragment.parts[0].state):
            fragment.take_back_state()
        self.is_torn = False
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The algorithm's state with what has arrived for it, and what is this worker's own."""
        if self.is_torn:
            raise RuntimeError(
                "A round has failed while it was being applied, so the parameters are half those "
                "of before. Go back to the last checkpoint."
            )
        fragment, received, pending = self.fragment, None, None
        if self.pending is not None:
            received = self._arrived(self.pending)
            pending = self.pending.state_dict()
            if not self._exchange.is_weighted:
                pending["messages"] = fragment.gather(fragment.messages())
        shared = {"state": dict(fragment.state), "received": received}
        return shared, {"pending": pending, **fragment.state_dict()}

    def _arrived(self, pending: PendingRound) -> Tensor:
        """All that a pending round has brought, once it is here, as it is applied later."""
        received, weight = self._receive(pending)
        self._keep_lost(pending)
        for bucket, whole in zip(self.fragment.buckets, received, strict=True):
            whole[: len(bucket)].div_(weight)
            for part, share in bucket.split(whole) if not pending.is_divided else ():
                part.make_absolute(share)
        pending.is_divided = True
        return self.fragment.gather(received)

    @torch.no_grad()
    def apply_saved(self, pending: dict[str, Any]) -> None:
        """Apply a round that another run had left under way, where nothing stays under way.

        The parameters move by as much as the result moves the start. So the local steps made
        meanwhile stay, and are in the message of the next round.

        Args:
            pending: What to know of it; its ``"received"``, the own ``"messages"`` if the
                algorithm needs them, and the parameters at the ``"sent_params"``, flat, or None.
        """
        fragment, algorithm = self.fragment, self._algorithm
        received, sent_params = fragment.split(pending["received"]), pending["sent_params"]
        messages = fragment.split(pending["messages"]) if "messages" in pending else received
        for part, share, message in zip(fragment.parts, received, messages, strict=True):
            local = torch.empty_like(share)
            part.read_local(local)
            before = part.start()
            if sent_params is not None:
                before = sent_params[part.chunk.start : part.chunk.stop].to(local)
            moved = None if before is None else local - before
            if pending["told"] is not None:
                algorithm.receive_scalars(
                    [tuple(numbers) for numbers in pending["told"]], part.state
                )
            result = algorithm.update(message, share, part.state)
            is_sound = moved is not None and bool(torch.isfinite(moved).all())
            part.unpack(moved.add_(result) if moved is not None and is_sound else result)
        if fragment.has_uncut_state:
            fragment.take_back_state()

    def give_up(self) -> list[Handle]:
        """Forget the pending round; its handles are still to be released."""
        pending, self.pending = self.pending, None
        return [] if pending is None else pending.handles

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` has given."""
        fragment, pending = self.fragment, own["pending"]
        if self.pending is not None:
            self._receive(self.pending)
        for handle in self.give_up():
            handle.release()
        fragment.load_state_dict(shared["state"], own)
        if pending is None:
            return
        if not fragment.holds:
            raise ValueError("The checkpoint holds a round under way, but overlap is off.")
        received = fragment.load_pending(shared["received"], pending.get("messages"))
        self.pending = PendingRound.arrived(pending, received)
