"""Exchanges that take as long as they would on slower links."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.store import publish
from lightning_loco.distributed.work import ExplainErrors, WaitTimer
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import PendingStatuses, WorkerStatus
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.exchanges.base import Exchange, Handle
from lightning_loco.engine.exchanges.compressed import CompressedAllReduce
from lightning_loco.links import Links, LinkTimes, TransferTime
from lightning_loco.topology import Topology

_SLOTS = 1024

_LONGEST_NAP_S = 0.2


class SendTimes:
    """Every worker notes in the job's store when each of its messages leaves, before it does.

    So whoever has received a message finds there when it left, without waiting. Times are those of
    the clock's ``wall_time``, which is one clock on one machine. Notes are overwritten
    after 1024 messages.

    Args:
        group: The workers; at least two.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._store = group.own_store("departures")
        self._worker = group.worker

    def note(self, number: int, at: float) -> None:
        """Message ``number`` of this worker leaves then."""
        publish(self._store, self._key(self._worker, number), f"{number} {at!r}")

    def latest(self, number: int, workers: Collection[int], own: float) -> float:
        """When the last of these workers' messages ``number`` has left, or one's own has.

        Args:
            number: As in :meth:`note`; the same message has the same number on all workers.
            workers: The others; those who have noted nothing are left out.
            own: When one's own has left.
        """
        keys = [self._key(worker, number) for worker in workers]
        if not keys or not self._store.check(keys):
            return own
        noted = [_read(note, number) for note in self._store.get_all(keys)]
        return max([own, *(at for at in noted if at is not None)])

    def _key(self, worker: int, number: int) -> str:
        return f"{worker}/{number % _SLOTS}"


def _read(note: bytes, number: int) -> float | None:
    """When the message of this number has left, if the note says so."""
    found = re.fullmatch(rb"(\d{1,18}) (\d{1,12}(?:\.\d{1,12})?)", note)
    return float(found[2]) if found and int(found[1]) == number else None


class LinkEmulator:
    """An exchange whose messages arrive when they would have come over the workers' links.

    The messages travel at once, unchanged. What they bring is shown later: when the last of those
    who send has sent, what this worker has sent before has left its link, and the time has passed
    that the bytes take there. Until then :meth:`EmulatedHandle.has_arrived` says no, and
    :meth:`EmulatedHandle.wait` sleeps.

    Args:
        exchange: What moves the messages.
        links: Of the workers.
        group: The workers; at least two.
        statistics: Where bytes are counted, and what the link takes.
        topology: Who are neighbours; None if everybody exchanges with everybody.
    """

    def __init__(
        self,
        exchange: Exchange,
        links: Links,
        group: WorkerGroup,
        statistics: Statistics,
        topology: Topology | None = None,
    ) -> None:
        self.is_weighted = exchange.is_weighted
        self.carries_status = exchange.carries_status
        self._exchange = exchange
        self._times = LinkTimes(links, group.num_workers)
        self._group = group
        self._topology = topology if not exchange.is_weighted else None
        self._link = LinkUse(statistics)
        self._send_times = SendTimes(group)
        self._count = 0

    def start(self, bucket: Bucket, round_index: int) -> EmulatedHandle:
        """Send a bucket; RuntimeError if it would be under way for longer than the timeout."""
        group, number = self._group, self._count
        self._count += 1
        label, began = f"round {round_index}", group.clock.wall_time()
        departure = max(began, self._link.free_at)
        with ExplainErrors(group, label):
            self._send_times.note(number, departure)
        before = self._link.statistics.bytes_sent
        handle = self._exchange.start(bucket, round_index)
        num_bytes = self._link.statistics.bytes_sent - before
        others = self._others(round_index)

        def span(part_bytes: int) -> TransferTime:
            found = self._span(part_bytes, bucket.wire.nbytes, round_index)
            self._link.statistics.emulated_bytes += part_bytes
            if found.seconds > group.timeout_s:
                raise RuntimeError(
                    f"{label} would take {found.seconds:.1f} s on the link that is emulated, "
                    f"longer than timeout_s={group.timeout_s:g}. Raise it, or take a faster link."
                )
            return found

        def departed() -> float:
            with ExplainErrors(group, label):
                return self._send_times.latest(number, others, departure)

        first = span(num_bytes)
        self._link.free_at = departure + first.busy_s
        return EmulatedHandle(handle, self._link, group, first, began, span, departed)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """What the exchange itself would bring: a link changes no number."""
        return self._exchange.simulate(messages, round_index)

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """As the exchange does."""
        self._exchange.write_status(bucket, status, label)

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """The statuses behind the message, which arrive with it."""
        return self._exchange.read_statuses(bucket, handle, status, label)

    def send_status(self, status: WorkerStatus, label: str) -> PendingStatuses:
        """Send the status as the exchange does, without delay."""
        return self._exchange.send_status(status, label)

    def wait_at_sync_point(self, status: WorkerStatus, label: str) -> list[WorkerStatus] | None:
        """Wait as the exchange does, without delay."""
        return self._exchange.wait_at_sync_point(status, label)

    def _others(self, round_index: int) -> list[int]:
        own, n = self._group.worker, self._group.num_workers
        senders: Any = range(n)
        if self._topology is not None:
            senders = self._topology.weights(own, n, round_index)
        return [worker for worker in senders if worker != own]

    def _span(self, num_bytes: int, whole_bytes: int, round_index: int) -> TransferTime:
        """Of so many bytes that this worker has sent; ``whole_bytes`` are those of the message."""
        own, n = self._group.worker, self._group.num_workers
        if self._topology is None:
            exchange = self._exchange
            hops = (
                exchange.num_hops if isinstance(exchange, (AllReduce, CompressedAllReduce)) else 1
            )
            return self._times.mean(num_bytes, hops, round_index)
        copies = len(self._topology.receivers(own, n, round_index))
        message = num_bytes / copies if copies else whole_bytes
        return self._times.neighbors(own, message, self._topology, round_index)


class LinkUse:
    """One worker's link: until when it is busy, and what of its time was waited for.

    Args:
        statistics: Where that is counted.

    Attributes:
        free_at: When all that was sent has left, by the clock's ``wall_time``.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.free_at = 0.0
        self._counted_until = 0.0
        statistics.start_emulation()

    def count(self, began: float, end: float, waited_from: float) -> None:
        """Something was under way, and waited for from some time on; no second counts twice."""
        began, waited_from = max(began, self._counted_until), max(waited_from, self._counted_until)
        self.statistics.count_emulated(max(0.0, end - began), max(0.0, end - waited_from))
        self._counted_until = max(self._counted_until, end)


class EmulatedHandle:
    """A bucket that is here, perhaps, and not to be seen yet.

    An exchange may send more while it is looked at or waited for. What it sends then leaves then,
    after what it has sent before has arrived.

    Args:
        handle: Of the exchange itself.
        link: This worker's.
        group: The workers.
        first: What the bytes take that left at the start.
        began: When they left, by the clock's ``wall_time``.
        span: What further bytes take.
        departed: When the last sender's message left, once the handle's has arrived.
    """

    def __init__(
        self,
        handle: Any,
        link: LinkUse,
        group: WorkerGroup,
        first: TransferTime,
        began: float,
        span: Callable[[int], TransferTime],
        departed: Callable[[], float],
    ) -> None:
        self._handle = handle
        self._link = link
        self._group = group
        self._clock = group.clock
        self._parts = [(began, first)]
        self._span = span
        self._departed = departed
        self._left_at = self._arrives_at = 0.0
        self._is_known = False
        self._received: Tensor | None = None

    @property
    def lost(self) -> Tensor | None:
        """What was lost of the own message, as the handle of the exchange itself says."""
        lost: Tensor | None = self._handle.lost
        return lost

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never waits."""
        if self._received is not None:
            return True
        is_here = self._watched(self._handle.has_arrived)
        return is_here and self._clock.wall_time() >= self._arrival()

    def arrives_within(self, seconds: float) -> bool:
        """Whether the message itself comes soon: nobody who has sent has to be called."""
        return bool(self._watched(lambda: self._handle.arrives_within(seconds)))

    def wait(self) -> Tensor:
        """Return what was received, once it would have come; later calls return it again."""
        if self._received is None:
            entered = self._clock.wall_time()
            received: Tensor = self._watched(self._handle.wait)
            arrival = self._arrival()
            with WaitTimer(self._link.statistics, self._clock):
                self._sleep_until(arrival)
            self._link.count(self._left_at, arrival, entered)
            self._received = received
        return self._received

    def release(self) -> None:
        """What was received has been used, and its memory may serve again."""
        self._received = None
        self._handle.release()

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Call something that may send, and take note of what it has sent."""
        statistics, now = self._link.statistics, self._clock.wall_time()
        before = statistics.bytes_sent
        result = call()
        if (more := statistics.bytes_sent - before) > 0:
            self._parts.append((now, self._span(more)))
            self._is_known = False
        return result

    def _arrival(self) -> float:
        """When what has arrived would have come; only then it is known who was the last to send."""
        if not self._is_known:
            end = self._left_at = self._departed()
            for sent_at, span in self._parts:
                busy_until = max(end, sent_at) + span.busy_s
                self._link.free_at = max(self._link.free_at, busy_until)
                end = busy_until + span.latency_s
            self._arrives_at, self._is_known = end, True
        return self._arrives_at

    def _sleep_until(self, arrival: float) -> None:
        watchdog = self._group.watchdog
        while (left_s := arrival - self._clock.wall_time()) > 0:
            self._clock.sleep(min(left_s, _LONGEST_NAP_S))
            if watchdog is not None:
                watchdog.raise_if_failed()
