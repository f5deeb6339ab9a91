"""The mean of compressed messages: two all-to-all exchanges of bytes, or one if they are sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.background import run_in_thread
from lightning_loco.compression import Codec, Compression
from lightning_loco.compression.sums import add_up, average_senders, shards, subtract_written
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import PendingWork, WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.exchange import Arrived, SeparateStatuses

Swap = Callable[[dict[int, Tensor], dict[int, Tensor]], None]
"""Sends each worker its tensor and receives one from each; empty tensors are not sent."""

_LONGEST_JOIN_S = 5.0


class CompressedSum:
    """The exchange of one compressed message, which ends with the sum or the mean of all.

    Args:
        compression: How it is compressed.
        message: Flat; not changed before :meth:`run`.
        worker: Number of this worker.
        num_workers: Number of workers N.
        memory: For the sum, if the loss is fed back. Default: the message's memory.
    """

    def __init__(
        self,
        compression: Compression,
        message: Tensor,
        worker: int,
        num_workers: int,
        memory: Tensor | None = None,
    ) -> None:
        self._codec = compression.codec
        self._message = message
        self._worker = worker
        self._num_workers = num_workers
        self._has_feedback = compression.has_feedback
        self._memory = message if memory is None else memory
        self._wire = self._codec.encode(message)

    @property
    def num_bytes(self) -> int:
        """Bytes that this worker sends."""
        others, size = self._num_workers - 1, self._wire.numel()
        if self._codec.is_sparse:
            return others * size
        own = shards(self._codec, self._message.numel(), self._num_workers)[self._worker].wire
        length: int = own.stop - own.start
        return size - length + others * length

    def run(self, swap: Swap) -> Tensor:
        """Exchange; the loss is left in the message's memory, if it is fed back.

        Returns:
            The sum over all workers, or the mean over the senders; equal on all workers.
        """
        return self._add_sparse(swap) if self._codec.is_sparse else self._add_shards(swap)

    def _others(self) -> list[int]:
        return [worker for worker in range(self._num_workers) if worker != self._worker]

    def _in_order(self, own: Tensor, inbox: dict[int, Tensor]) -> list[Tensor]:
        return [inbox.get(worker, own) for worker in range(self._num_workers)]

    def _add_sparse(self, swap: Swap) -> Tensor:
        wire = self._wire
        inbox = {worker: torch.empty_like(wire) for worker in self._others()}
        swap(dict.fromkeys(inbox, wire), inbox)
        if self._has_feedback:
            subtract_written(self._codec, wire, self._message)
        return _combine(self._codec, self._in_order(wire, inbox), self._memory)

    def _add_shards(self, swap: Swap) -> Tensor:
        codec, wire = self._codec, self._wire
        parts = shards(codec, self._message.numel(), self._num_workers)
        own = parts[self._worker]
        piece = wire[own.wire]
        inbox = {worker: torch.empty_like(piece) for worker in self._others()}
        swap({worker: wire[parts[worker].wire] for worker in inbox}, inbox)
        total = torch.empty_like(self._message[own.values])
        add_up(codec, self._in_order(piece, inbox), total)
        if self._has_feedback:
            subtract_written(codec, wire, self._message)
        sums = torch.empty_like(wire)
        codec.encode(total, sums[own.wire])
        received = {worker: sums[parts[worker].wire] for worker in inbox}
        swap(dict.fromkeys(inbox, sums[own.wire]), received)
        if self._has_feedback:
            subtract_written(codec, sums[own.wire], total)
            self._message[own.values].add_(total)
        return codec.decode(sums, self._memory)


def _combine(codec: Codec, wires: Sequence[Tensor], memory: Tensor) -> Tensor:
    combine = average_senders if codec.averages_senders else add_up
    return combine(codec, wires, memory)


def simulate_sum(compression: Compression, messages: Sequence[Tensor]) -> Tensor:
    """Return the sum that every worker decodes; losses are left in the messages if fed back.

    Args:
        compression: How messages are compressed.
        messages: Of all workers, in order.
    """
    codec, total = compression.codec, torch.empty_like(messages[0])
    wires = [codec.encode(message) for message in messages]
    if compression.has_feedback:
        for wire, message in zip(wires, messages, strict=True):
            subtract_written(codec, wire, message)
    _combine(codec, wires, total)
    if codec.is_sparse:
        return total
    sums = codec.encode(total)
    if compression.has_feedback:
        subtract_written(codec, sums, total)
        parts = shards(codec, total.numel(), len(messages))
        for part, message in zip(parts, messages, strict=True):
            message[part.values].add_(total[part.values])
    return codec.decode(sums, total)


class CompressedAllReduce(SeparateStatuses):
    """Every worker receives the sum of the messages, or their mean over the senders.

    Between its two exchanges of bytes a worker adds up. If rounds are overlapped, a thread
    does it during the local steps, bucket by bucket, so that all workers make their calls in one
    order; otherwise :meth:`CompressedHandle.wait` does.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
        compression: How messages are compressed.
        is_overlapped: Whether local steps continue while rounds are pending.
    """

    is_weighted = True

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        compression: Compression,
        is_overlapped: bool,
    ) -> None:
        super().__init__(group, statistics)
        self._compression = compression
        self._is_overlapped = is_overlapped
        self._spare: list[Tensor] = []
        self._last: Future[Tensor] | None = None  # of the bucket that was sent last

    def start(self, bucket: Bucket, round_index: int) -> CompressedHandle | Arrived:
        """Encode the message; a worker of weight 0 must send zeros."""
        group, message = self._group, bucket.wire
        if group.num_workers == 1:
            lost = torch.zeros_like(message) if self._compression.has_feedback else None
            return Arrived(message, lost)
        memory = self._take(message) if self._compression.has_feedback else None
        exchange = CompressedSum(
            self._compression, message, group.worker, group.num_workers, memory
        )
        label, statistics = f"round {round_index}", self._statistics

        def swap(sent: dict[int, Tensor], inbox: dict[int, Tensor]) -> None:
            self._swap(label, sent, inbox)

        def run() -> Tensor:
            return exchange.run(swap)

        n = group.num_workers
        statistics.count_compressed(exchange.num_bytes, 2 * (n - 1) * message.nbytes // n)
        if self._is_overlapped:
            self._last = run_in_thread(_in_turn(self._last, run, message.device))
        lost = message if self._compression.has_feedback else None
        coming = self._last if self._is_overlapped else None
        timed = WaitTimer(statistics, group.clock)
        return CompressedHandle(run, coming, lost, timed, lambda: self._give_back(memory))

    @property
    def num_hops(self) -> int:
        """How many messages follow each other."""
        return 1 if self._compression.codec.is_sparse else 2

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """Decode the result; losses are left in the messages if they are fed back."""
        if len(messages) == 1:
            total = messages[0].clone()
            messages[0].zero_()
            return [total]
        total = simulate_sum(self._compression, messages)
        return [total.clone() for _ in messages]

    def _swap(self, label: str, sent: dict[int, Tensor], inbox: dict[int, Tensor]) -> None:
        group = self._group
        wires = {peer: tensor for peer, tensor in sent.items() if tensor.numel()}
        staged = group.wait_blocks_host and any(tensor.is_cuda for tensor in inbox.values())
        if staged:
            wires = {peer: tensor.cpu() for peer, tensor in wires.items()}
        inputs = {p: t.cpu() if staged else t for p, t in inbox.items() if t.numel()}
        ranks, data = group.ranks, group.data
        operations = [
            *(dist.P2POp(dist.irecv, inputs[peer], ranks[peer], data) for peer in inputs),
            *(dist.P2POp(dist.isend, wires[peer], ranks[peer], data) for peer in wires),
        ]
        if not operations:
            return
        with ExplainErrors(group, label):
            works = dist.batch_isend_irecv(operations)
        PendingWork(group, label, works).wait()
        for peer in inputs if staged else ():
            inbox[peer].copy_(inputs[peer])

    def _take(self, message: Tensor) -> Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() == message.numel():
                return self._spare.pop(index)
        return torch.empty_like(message)

    def _give_back(self, memory: Tensor | None) -> None:
        if memory is not None:
            self._spare.append(memory)


def _in_turn(
    before: Future[Tensor] | None, run: Callable[[], Tensor], device: torch.device
) -> Callable[[], Tensor]:
    """Run after an earlier call; on a GPU in a new stream, and wait for it."""
    is_cuda = device.type == "cuda"
    ready = torch.cuda.current_stream(device).record_event() if is_cuda else None

    def in_turn() -> Tensor:
        if before is not None:
            wait([before])
        if ready is None:
            return run()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            ready.wait()
            total = run()
            torch.cuda.current_stream(device).synchronize()
        return total

    return in_turn


class CompressedHandle:
    """The sum of a bucket's messages, which is being computed.

    Args:
        run: Exchanges, and returns the sum.
        coming: Its result, if a thread runs it.
        lost: Memory of the own message's loss; None if it is not fed back.
        timed: Counts the seconds of the wait.
        give_back: Gives memory back.
    """

    def __init__(
        self,
        run: Callable[[], Tensor],
        coming: Future[Tensor] | None,
        lost: Tensor | None,
        timed: WaitTimer,
        give_back: Callable[[], None],
    ) -> None:
        self._run = run
        self._coming = coming
        self._timed = timed
        self._give_back = give_back
        self.lost = lost

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never, unless a thread runs it."""
        return self._coming is not None and self._coming.done()

    def wait(self) -> Tensor:
        """Return the sum; raises RuntimeError if a worker is missing or has failed."""
        with self._timed:
            return self._run() if self._coming is None else self._coming.result()

    def release(self) -> None:
        """Give the memory back; a thread gets a moment to end once its works have failed."""
        if self._coming is not None:
            wait([self._coming], _LONGEST_JOIN_S)
        self._give_back()
