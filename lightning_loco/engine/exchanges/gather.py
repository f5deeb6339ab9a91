"""The messages of all workers, for algorithms that combine them otherwise than by their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.work import PendingWork, WaitTimer
from lightning_loco.distributed.worker_group import ExplainErrors
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.exchange import Arrived, SeparateStatuses


class Gather(SeparateStatuses):
    """Every worker receives the messages of all, ``(N, length)``, in order of the workers.

    Each worker receives N - 1 times the bytes that it sends, and needs memory for all of them.

    Args:
        group: The workers.
        statistics: Where bytes and seconds are counted.
    """

    is_weighted = True

    def start(
        self, bucket: Bucket, round_index: int, weight: float = 1.0
    ) -> GatherHandle | Arrived:
        """Send a bucket to all workers as it is; a worker of weight 0 must send zeros."""
        group, message, label = self._group, bucket.wire, f"round {round_index}"
        if group.data is None:
            return Arrived(message.clone().unsqueeze(0))
        received = message.new_empty(group.num_workers, len(message))
        with ExplainErrors(group, label):
            work = dist.all_gather(list(received), message, group=group.data, async_op=True)
        self._statistics.bytes_sent += (group.num_workers - 1) * message.nbytes
        works = PendingWork(group, label, [work])
        return GatherHandle(works, received, WaitTimer(self._statistics, group.clock))

    @property
    def num_hops(self) -> int:
        """How many messages follow each other: an all-gather goes around a ring once."""
        return self._group.num_workers - 1

    def simulate(
        self, messages: Sequence[Tensor], round_index: int, weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Return all messages to each worker."""
        return [torch.stack(list(messages)) for _ in messages]


class GatherHandle:
    """The messages of all workers, which are being received.

    Args:
        works: Of the all-gather.
        received: Where they are written, ``(N, length)``.
        timer: Counts the seconds of the wait.
    """

    lost = None

    def __init__(self, works: PendingWork, received: Tensor, timer: WaitTimer) -> None:
        self._works = works
        self._received = received
        self._timer = timer

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once; never waits."""
        return self._works.is_completed()

    def wait(self) -> Tensor:
        """Return the messages."""
        with self._timer:
            self._works.wait()
        return self._received

    def release(self) -> None:
        """Do nothing: the memory belongs to the caller."""
