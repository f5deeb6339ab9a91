"""Emulation of slower links: exchanges whose results are delayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from lightning_loco.costs import LinkQueue, Links, LinkTimes, TransferTime
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.store import publish
from lightning_loco.distributed.work import WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.distributed.worker_status import PendingStatuses, WorkerStatus
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.exchanges.compressed import CompressedAllReduce
from lightning_loco.engine.exchanges.exchange import Exchange, Handle
from lightning_loco.engine.exchanges.gather import Gather
from lightning_loco.topology import Topology

_SLOTS = 1024

_LONGEST_NAP_S = 0.2


class SendTimes:
    """Records in the job's store when each message of each worker is sent, before it is sent.

    So the receiver of a message can read its send time without waiting. Times are from the
    clock's ``wall_time``, which is the same for all processes of a host. Records are overwritten
    after 1024 messages.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._store = group.own_store(f"departures/{group.place}")
        self._worker = group.worker

    def record(self, number: int, send_time: float) -> None:
        """Record the send time of message ``number`` of this worker."""
        publish(self._store, self._key(self._worker, number), f"{number} {send_time!r}")

    def latest(self, number: int, workers: Collection[int], own: float) -> float:
        """Return the latest send time of message ``number`` of some workers and this one.

        The same message has the same number on all workers; those without a record are ignored.
        """
        keys = [self._key(worker, number) for worker in workers]
        if not keys or not self._store.check(keys):
            return own
        records = [record.split() for record in self._store.get_all(keys)]
        return max([own, *(float(time) for sent, time in records if int(sent) == number)])

    def _key(self, worker: int, number: int) -> str:
        return f"{worker}/{number % _SLOTS}"


class LinkEmulator:
    """An exchange whose results are delayed until they would have arrived over the emulated links.

    The messages are sent immediately and unchanged. Their result becomes available once the last
    sender has sent, this worker's link is free of earlier messages, and the time has passed that
    the bytes take on the link. Until then :meth:`EmulatedHandle.has_arrived` returns False, and
    :meth:`EmulatedHandle.wait` sleeps. It needs at least two workers. Without a
    topology, all exchange with all.
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
        self._statistics = statistics
        self._link = LinkQueue()
        self._send_times = SendTimes(group)
        self._count = 0

    def start(self, bucket: Bucket, round_index: int, weight: float = 1.0) -> EmulatedHandle:
        """Send a bucket; raises RuntimeError if it would take longer than the timeout."""
        group, number = self._group, self._count
        self._count += 1
        label, began = f"round {round_index}", group.clock.wall_time()
        # All workers measure by wall time: a result arrives some time after the last one has sent.
        send_time = self._link.departure(began)
        with ExplainErrors(group, label):
            self._send_times.record(number, send_time)
        before = self._statistics.bytes_sent
        handle = self._exchange.start(bucket, round_index, weight)
        num_bytes = self._statistics.bytes_sent - before
        others = self._others(round_index)

        def span(part_bytes: int) -> TransferTime:
            found = self._span(part_bytes, bucket.wire.nbytes, round_index)
            if found.seconds > group.timeout_s:
                raise RuntimeError(
                    f"{label} would take {found.seconds:.1f} s on the link that is emulated, "
                    f"longer than timeout_s={group.timeout_s:g}. Raise it, or take a faster link."
                )
            return found

        def last_send_time() -> float:
            with ExplainErrors(group, label):
                return self._send_times.latest(number, others, send_time)

        first = span(num_bytes)
        self._link.send(send_time, first)
        return EmulatedHandle(
            handle, self._link, group, self._statistics, first, began, span, last_send_time
        )

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Return the results of the exchange itself: a link does not change numbers."""
        return self._exchange.simulate(messages, round_index, weights)

    def write_status(self, bucket: Bucket, status: WorkerStatus, label: str) -> None:
        """Write the status as the exchange does."""
        self._exchange.write_status(bucket, status, label)

    def read_statuses(
        self, bucket: Bucket, handle: Handle, status: WorkerStatus, label: str
    ) -> PendingStatuses:
        """Return the statuses that arrive with the message."""
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
        """Return the time that ``num_bytes`` sent bytes of a message of ``whole_bytes`` take.

        The ranks of a worker share its link and send at the same time.
        """
        own, n = self._group.worker, self._group.num_workers
        num_bytes *= self._group.replica_size
        whole_bytes *= self._group.replica_size
        if self._topology is None:
            exchange = self._exchange
            hops = (
                exchange.num_hops
                if isinstance(exchange, (AllReduce, CompressedAllReduce, Gather))
                else 1
            )
            return self._times.mean(num_bytes, hops, round_index)
        copies = len(self._topology.receivers(own, n, round_index))
        message = num_bytes / copies if copies else whole_bytes
        times = self._times.all_neighbors(message, self._topology, round_index)
        return times.of_worker(own)


class EmulatedHandle:
    """The handle of a bucket whose result may have arrived, but is not available yet.

    The bytes that were sent when it ``began``, by the clock's ``wall_time``, take the time
    ``first``. The exchange may send more bytes in calls of :meth:`has_arrived` or :meth:`wait`.
    These take their time, which ``span`` returns, on the link after the bytes before them have
    arrived. ``last_send_time`` is called once the result has arrived.
    """

    def __init__(
        self,
        handle: Any,
        link: LinkQueue,
        group: WorkerGroup,
        statistics: Statistics,
        first: TransferTime,
        began: float,
        span: Callable[[int], TransferTime],
        last_send_time: Callable[[], float],
    ) -> None:
        self._handle = handle
        self._link = link
        self._group = group
        self._statistics = statistics
        self._clock = group.clock
        self._parts = [(began, first)]
        self._span = span
        self._last_send_time = last_send_time
        self._sent_at = self._arrives_at = 0.0
        self._is_known = False
        self._received: Tensor | None = None

    @property
    def lost(self) -> Tensor | None:
        """The loss of this worker's message, from the handle of the exchange itself."""
        lost: Tensor | None = self._handle.lost
        return lost

    def has_arrived(self) -> bool:
        """Return whether :meth:`wait` would return or raise immediately; never waits."""
        if self._received is not None:
            return True
        is_here = self._watched(self._handle.has_arrived)
        return is_here and self._clock.wall_time() >= self._arrival()

    def arrives_within(self, seconds: float) -> bool:
        """Return whether the message itself arrives within ``seconds``."""
        return bool(self._watched(lambda: self._handle.arrives_within(seconds)))

    def wait(self) -> Tensor:
        """Wait until the result would have arrived and return it; may be called repeatedly."""
        if self._received is None:
            received: Tensor = self._watched(self._handle.wait)
            arrival = self._arrival()
            with WaitTimer(self._statistics, self._clock):
                self._sleep_until(arrival)
            shift_s = self._clock.now() - self._clock.wall_time()
            self._statistics.record("send", self._sent_at + shift_s, arrival + shift_s)
            self._received = received
        return self._received

    def release(self) -> None:
        """Release the memory of the result for reuse."""
        self._received = None
        self._handle.release()

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Call a function that may send, and record the bytes that it has sent."""
        now, before = self._clock.wall_time(), self._statistics.bytes_sent
        result = call()
        if (more := self._statistics.bytes_sent - before) > 0:
            self._parts.append((now, self._span(more)))
            self._is_known = False
        return result

    def _arrival(self) -> float:
        """Return when a result that is here would have arrived over the link."""
        if not self._is_known:
            end = self._sent_at = self._last_send_time()
            for sent_at, span in self._parts:
                end = self._link.send(max(end, sent_at), span)
            self._arrives_at, self._is_known = end, True
        return self._arrives_at

    def _sleep_until(self, arrival: float) -> None:
        while (left_s := arrival - self._clock.wall_time()) > 0:
            self._clock.sleep(min(left_s, _LONGEST_NAP_S))
            self._group.raise_if_failed()
