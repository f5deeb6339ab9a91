"""The mean of the clients' gradients, message by message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.parameter_server.buckets import Accumulator, Message
from lightning_loco.parameter_server.clients import Clients
from lightning_loco.parameter_server.protocol import Lane, Unreachable, Wire

AHEAD_BYTES = 16 * 2**20
_ALIGNED = 8


class Inbox:
    """Receives a client's messages ahead of the one that is summed, also before a step begins.

    Those of the first client come where the sum will be, if they travel in its dtype; the others go
    round in some memory that holds at least two.

    Args:
        client: Who sends.
        messages: How gradients are cut and written.
        accumulator: Where they are summed.
        is_first: Whether the sum begins with this client.
    """

    def __init__(
        self,
        client: Wire,
        messages: Sequence[Message],
        accumulator: Accumulator,
        is_first: bool,
    ) -> None:
        self._client = client
        self._messages = messages
        self._accumulator = accumulator
        self._is_direct = is_first and all(m.wire_dtype == accumulator.dtype for m in messages)
        self._longest = -(-max(message.num_bytes for message in messages) // _ALIGNED) * _ALIGNED
        self._places = min(len(messages), max(2, AHEAD_BYTES // self._longest))
        self._memory: Tensor | None = None
        self._coming: deque[tuple[Tensor, dist.Work]] = deque()
        self._awaited: deque[tuple[Tensor, Callable[[], None]]] = deque()
        self._failure: Unreachable | None = None
        self._next = len(messages)

    def open(self) -> None:
        """Begin to receive the messages of the next step, if the client will make one."""
        self._next = 0
        self._receive_ahead()

    def next(self) -> Tensor:
        """Wait for the next message of this step; valid until the next one is asked for.

        Raises:
            Unreachable: If the client is gone or too late.
        """
        self._await()
        if not self._awaited:
            assert self._failure is not None
            raise self._failure
        memory, wait = self._awaited.popleft()
        wait()
        self._receive_ahead()
        self._await()
        return memory

    def _await(self) -> None:
        """Begin to wait for what has been asked for: it comes without fail once a step begins."""
        while self._coming:
            memory, work = self._coming.popleft()
            self._awaited.append((memory, self._client.begin_wait(work, "its gradients")))

    def _receive_ahead(self) -> None:
        while self._next < len(self._messages) and (
            self._is_direct
            or len(self._coming) + len(self._awaited) < self._places - 1
            or self._places == 1
        ):
            memory = self._place(self._next)
            self._next += 1
            try:
                self._coming.append((memory, self._client.receive(memory, Lane.GRADIENTS)))
            except Unreachable as error:
                self._failure = error
                self._next = len(self._messages)

    def _place(self, index: int) -> Tensor:
        if self._is_direct:
            return self._accumulator.slices[index]
        message = self._messages[index]
        if self._memory is None:
            self._memory = torch.empty(self._places, self._longest, dtype=torch.uint8)
        return self._memory[index % self._places, : message.num_bytes].view(message.wire_dtype)


class MeanGradient:
    """Receives each client's messages ahead and sums them in the order of the clients.

    Args:
        clients: Who sends.
        messages: How gradients are cut and written.
        accumulator: Where they are summed.
    """

    def __init__(
        self, clients: Clients, messages: Sequence[Message], accumulator: Accumulator
    ) -> None:
        self._clients = clients
        self._messages = messages
        self._accumulator = accumulator
        self._inboxes = {
            client: Inbox(client, messages, accumulator, number == 0)
            for number, client in enumerate(clients.left)
        }

    def expect(self, senders: Iterable[Wire]) -> None:
        """Begin to receive the gradients of some clients' next step."""
        for client in senders:
            self._inboxes[client].open()

    def receive(self, index: int, senders: Iterable[Wire]) -> None:
        """Have the mean of a message in the accumulator, over the senders that are left.

        Raises:
            RuntimeError: If no sender is left, or too few clients, or the mean is not finite.
        """
        message, target = self._messages[index], self._accumulator.slices[index]
        arrived: list[tuple[Wire, Tensor]] = []
        for client in senders:
            if client not in self._clients.left:
                continue
            with self._clients.losing(client):
                memory = self._inboxes[client].next()
                arrived.append((client, memory))
                if len(arrived) > 1:
                    message.add(memory, target)
                elif memory is not target:
                    message.read(memory, target)
        if not arrived:
            raise RuntimeError("All workers that were making a step are gone.")
        if len(arrived) > 1:
            _divide(target, len(arrived))
        if not _is_finite(target):
            raise RuntimeError(_whose_is_not_finite(message, arrived, target))


def _divide(values: Tensor, count: int) -> None:
    """Divide in place; a power of two is inverted without rounding, and products are faster."""
    if count & (count - 1) == 0:
        values.mul_(1 / count)
    else:
        values.div_(count)


def _is_finite(values: Tensor) -> bool:
    """Whether all are finite; the sum tells in most cases, in one pass."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def _whose_is_not_finite(
    message: Message, arrived: Sequence[tuple[Wire, Tensor]], mean: Tensor
) -> str:
    """Say which clients' gradients make the mean infinite or no number.

    The first one's may have been where the mean is now, and can only be found by elimination.
    """
    names = [
        client.name
        for client, memory in arrived
        if memory is not mean and not _is_finite(message.read(memory, torch.empty_like(mean)))
    ]
    if not names and arrived[0][1] is mean:
        names = [arrived[0][0].name]
    return (
        f"{', '.join(names) or 'The sum over all workers'}: a gradient is not finite (infinite or "
        "NaN), and would have made the parameters of all workers so. Look at the loss there; for a "
        "batch that cannot be used, return None from training_step."
    )
