"""The mean of the clients' gradients, message by message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.clients import Clients
from lightning_loco.remote.inbox import Inbox
from lightning_loco.remote.message import Message
from lightning_loco.remote.wire import Wire


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
