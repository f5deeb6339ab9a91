"""Receiving a client's gradients ahead of their turn in the sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.message import Message
from lightning_loco.remote.unreachable import Unreachable
from lightning_loco.remote.wire import Lane, Wire

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
