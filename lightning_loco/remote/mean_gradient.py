"""The mean of the clients' gradients, message by message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.clients import Clients
from lightning_loco.remote.inbox import Inbox
from lightning_loco.remote.plan import Message
from lightning_loco.remote.wire import Wire


class MeanGradient:
    """Receives each client's messages ahead and sums them in the order of the clients.

    Args:
        clients: Who sends.
        messages: How gradients are cut, and their dtype on the wire.
        accumulator: Where they are summed.
    """

    def __init__(
        self, clients: Clients, messages: Sequence[Message], accumulator: Accumulator
    ) -> None:
        self._clients = clients
        self._accumulator = accumulator
        self._inboxes = {
            client: Inbox(client, messages, accumulator, is_first=number == 0)
            for number, client in enumerate(clients.left)
        }

    def expect(self, senders: Iterable[Wire]) -> None:
        """Begin to receive the gradients of some clients' next step."""
        for client in senders:
            self._inboxes[client].open()

    def receive(self, index: int, senders: Iterable[Wire]) -> None:
        """Have the mean of a message in the accumulator, over the senders that are left.

        Raises:
            RuntimeError: If no sender is left, or too few clients.
        """
        target = self._accumulator.slices[index]
        arrived = 0
        for client in senders:
            if client not in self._clients.left:
                continue
            try:
                memory = self._inboxes[client].next()
            except RuntimeError as error:
                self._clients.lose(client, error)
                continue
            arrived += 1
            if arrived > 1:
                target.add_(memory)
            elif memory is not target:
                target.copy_(memory)
        if arrived == 0:
            raise RuntimeError("All workers that were making a step are gone.")
        if arrived > 1:
            target.div_(arrived)
