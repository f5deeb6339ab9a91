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

    Messages are encoded without their weights: these may be large, and some codecs have a narrow
    range. So each weight travels in front of the bytes, and the worker that decodes them multiplies
    by it.

    Args:
        compression: How it is compressed.
        message: Flat; not changed before :meth:`run`.
        worker: Number of this worker.
        num_workers: Number of workers N.
        memory: For the sum, if the loss is fed back. Default: the message's memory.
        weight: Weight of the message. None: all weights are 1, or 0 with a message of zeros, and
            are not sent.
    """

    def __init__(
        self,
        compression: Compression,
        message: Tensor,
        worker: int,
        num_workers: int,
        memory: Tensor | None = None,
        weight: float | None = None,
    ) -> None:
        self._codec = compression.codec
        self._message = message
        self._worker = worker
        self._num_workers = num_workers
        self._has_feedback = compression.has_feedback
        self._memory = message if memory is None else memory
        self._weight = weight
        self._wire = self._codec.encode(message)

    @property
    def num_bytes(self) -> int:
        """Bytes that this worker sends."""
        others, size = self._num_workers - 1, self._wire.numel()
        heads = 0 if self._weight is None else others * _HEAD_BYTES
        if self._codec.is_sparse:
            return others * size + heads
        own = shards(self._codec, self._message.numel(), self._num_workers)[self._worker].wire
        length: int = own.stop - own.start
        return size - length + others * length + heads

    def run(self, swap: Swap) -> Tensor:
        """Exchange; the loss is left in the message's memory, if it is fed back.

        Returns:
            The weighted sum over all workers, or mean over the senders; equal on all workers.
        """
        return self._add_sparse(swap) if self._codec.is_sparse else self._add_shards(swap)

    def _workers(self) -> range:
        return range(self._num_workers)

    def _others(self) -> list[int]:
        return [worker for worker in self._workers() if worker != self._worker]

    def _in_order(self, own: Tensor, inbox: dict[int, Tensor]) -> list[Tensor]:
        return [inbox.get(worker, own) for worker in self._workers()]

    def _swap_weighted(
        self, swap: Swap, sent: dict[int, Tensor], inbox: dict[int, Tensor]
    ) -> list[float]:
        """Swap the encoded messages, and return the weights of all workers, in order."""
        if self._weight is None:
            swap(sent, inbox)
            return [1.0] * self._num_workers
        head = torch.tensor([self._weight], dtype=torch.float64, device="cpu").view(torch.uint8)
        head = head.to(self._wire.device)
        framed = {worker: torch.cat([head, part]) for worker, part in sent.items()}
        received = {w: part.new_empty(_HEAD_BYTES + len(part)) for w, part in inbox.items()}
        swap(framed, received)
        heads = [received[w][:_HEAD_BYTES] if w in received else head for w in self._workers()]
        for worker, part in received.items():
            inbox[worker].copy_(part[_HEAD_BYTES:])
        weights: list[float] = torch.cat(heads).view(torch.float64).tolist()
        return weights

    def _add_sparse(self, swap: Swap) -> Tensor:
        wire = self._wire
        inbox = {worker: torch.empty_like(wire) for worker in self._others()}
        weights = self._swap_weighted(swap, dict.fromkeys(inbox, wire), inbox)
        if self._has_feedback:
            subtract_written(self._codec, wire, self._message)
        wires = self._in_order(wire, inbox)
        return _combine(self._codec, wires, self._memory, weights)

    def _add_shards(self, swap: Swap) -> Tensor:
        codec, wire = self._codec, self._wire
        parts = shards(codec, self._message.numel(), self._num_workers)
        own = parts[self._worker]
        piece = wire[own.wire]
        inbox = {worker: torch.empty_like(piece) for worker in self._others()}
        sent = {worker: wire[parts[worker].wire] for worker in inbox}
        weights = self._swap_weighted(swap, sent, inbox)
        # The sum is encoded, too: relative to the largest weight it fits the codec's range.
        relative, largest = _relative(weights)
        total = torch.empty_like(self._message[own.values])
        add_up(codec, self._in_order(piece, inbox), total, relative)
        if self._has_feedback:
            subtract_written(codec, wire, self._message)
        sums = torch.empty_like(wire)
        codec.encode(total, sums[own.wire])
        received = {worker: sums[parts[worker].wire] for worker in inbox}
        swap(dict.fromkeys(inbox, sums[own.wire]), received)
        if self._has_feedback:
            subtract_written(codec, sums[own.wire], total)
            # The next message of this worker makes up for it, with its weight.
            self._message[own.values].add_(total, alpha=1 / (relative[self._worker] or 1.0))
        decoded = codec.decode(sums, self._memory)
        return decoded if largest == 1 else decoded.mul_(largest)


_HEAD_BYTES = 8


def _relative(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return the weights relative to the largest one, and that one; 1 if all are 0."""
    largest = max(weights) or 1.0
    return [weight / largest for weight in weights], largest


def _combine(
    codec: Codec, wires: Sequence[Tensor], memory: Tensor, weights: Sequence[float]
) -> Tensor:
    combine = average_senders if codec.averages_senders else add_up
    return combine(codec, wires, memory, weights)


def simulate_sum(
    compression: Compression, messages: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Return the sum that every worker decodes; losses are left in the messages if fed back.

    Args:
        compression: How messages are compressed.
        messages: Of all workers, in order.
        weights: Of the messages.
    """
    codec, total = compression.codec, torch.empty_like(messages[0])
    relative, largest = (weights, 1.0) if codec.is_sparse else _relative(weights)
    wires = [codec.encode(message) for message in messages]
    if compression.has_feedback:
        for wire, message in zip(wires, messages, strict=True):
            subtract_written(codec, wire, message)
    _combine(codec, wires, total, relative)
    if codec.is_sparse:
        return total
    sums = codec.encode(total)
    if compression.has_feedback:
        subtract_written(codec, sums, total)
        parts = shards(codec, total.numel(), len(messages))
        for part, message, weight in zip(parts, messages, relative, strict=True):
            message[part.values].add_(total[part.values], alpha=1 / (weight or 1.0))
    decoded = codec.decode(sums, total)
    return decoded if largest == 1 else decoded.mul_(largest)


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
        sends_weights: Whether weights may be other than 0 and 1, and are sent with the messages.
    """

    is_weighted = True

    def __init__(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        compression: Compression,
        is_overlapped: bool,
        sends_weights: bool = False,
    ) -> None:
        super().__init__(group, statistics)
        self._compression = compression
        self._is_overlapped = is_overlapped
        self._sends_weights = sends_weights
        self._spare: list[Tensor] = []
        self._last: Future[Tensor] | None = None  # of the bucket that was sent last

    def start(
        self, bucket: Bucket, round_index: int, weight: float = 1.0
    ) -> CompressedHandle | Arrived:
        """Encode the message; a worker of weight 0 must send zeros."""
        group, message = self._group, bucket.wire
        if group.num_workers == 1:
            if weight not in (0, 1):
                message.mul_(weight)
            lost = torch.zeros_like(message) if self._compression.has_feedback else None
            return Arrived(message, lost)
        memory = self._take(message) if self._compression.has_feedback else None
        exchange = CompressedSum(
            self._compression,
            message,
            group.worker,
            group.num_workers,
            memory,
            weight if self._sends_weights else None,
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

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Decode the result; losses are left in the messages if they are fed back."""
        weights = weights if self._sends_weights and weights else [1.0] * len(messages)
        if len(messages) == 1:
            total = messages[0] * weights[0]
            messages[0].zero_()
            return [total]
        total = simulate_sum(self._compression, messages, weights)
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
        # Kept from round to round: new memory costs a page fault for each page of it.
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
