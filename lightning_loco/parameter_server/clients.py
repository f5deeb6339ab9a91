"""The clients of a server: their requests and the replies, and which of them has failed."""

from __future__ import annotations

import functools
import math
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_loco._util.background import BackgroundThread
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.parameter_server.keep_alive import JOIN_TIMEOUT_S, KeepAlive
from lightning_loco.parameter_server.protocol import (
    Message,
    MessageKind,
    RankConnection,
    StepRequest,
    Unreachable,
)

_FAILURE_CHARACTERS = 300
_MIN_TIMEOUT_S = 0.01  # gloo takes 0 for the timeout of the group
_POLL_S = 0.01
_FAILURE_S = 2.0
_REPORTED_FAILURE_S = 0.5
"""Shorter for reports of a watchdog: the other ranks receive them from their own watchdogs."""
_NO_STEP = "step {:g} s after another worker's"
_NO_SYNC_POINT = "sync point {:g} s after another worker's"
_NO_KEEP_ALIVE = "sign of life for {:g} s"


Arrived = tuple[RankConnection, Message | Exception]
"""A client and its request, or the error with which its connection has ended."""


class Clients:
    """Receives requests and replies to them; raises an error that names a client that has failed.

    Clients that wait for a reply receive keep-alives while the server waits, so they never time out
    on a server that is alive. The server times out on a client after ``timeout_s``.

    Threads receive the requests, so that the server's main thread can be interrupted, and learns at
    once when a client has ended or sends a keep-alive.

    Args:
        connections: The clients, in the order in which their gradients are summed.
        reply_directly: Replies to requests that concern their client alone; returns whether it has
            replied.
        keep_alive: Sends keep-alives during waits. ``keep_alive.timeout_s`` limits, in seconds, how
            much later than the first client another one may take a step.
        clients_send_keep_alives: Whether clients send keep-alives whenever they wait, as servers
            do. A client that has sent some and then stops times out in any wait.

    Attributes:
        active: Clients that have neither left nor failed, in the order of the sum.
        pending: The request of each client that waits for the requests of the others.
        in_progress: Clients whose requests are being processed.
        farewell: The final values of the last client that has left with some.
    """

    def __init__(
        self,
        connections: Sequence[RankConnection],
        reply_directly: Callable[[RankConnection, Message], bool],
        keep_alive: KeepAlive,
        clients_send_keep_alives: bool = False,
    ) -> None:
        self.active = list(connections)
        self.pending: dict[RankConnection, Message] = {}
        self.in_progress: list[RankConnection] = []
        self.farewell: dict[str, Any] = {}
        self._reply_directly = reply_directly
        self._keep_alive = keep_alive
        self._clients_send_keep_alives = clients_send_keep_alives
        self._step_requests: dict[RankConnection, StepRequest] = {}
        self._arrived: queue.Queue[Arrived] = queue.Queue()
        keep_alive.senders.append(self._send_keep_alives)
        keep_alive.checks.append(self.raise_if_left)
        self._threads = [
            BackgroundThread(
                f"loco-requests-{client.name}", functools.partial(_receive, client, self._arrived)
            )
            for client in connections
        ]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- requests

    def wait_for_all(self) -> None:
        """Wait until each active client has a pending request.

        RuntimeError if a client has failed, ended or timed out.
        """
        while missing := [client for client in self.active if client not in self.pending]:
            # A timeout needs a client that came: all together may take any time between two steps.
            if self.pending:
                kinds = {message.kind for message in self.pending.values()}
                at_sync_point = kinds == {MessageKind.SYNC_POINT}
                self._receive_next(missing, _NO_SYNC_POINT if at_sync_point else _NO_STEP)
            else:
                can_time_out = self._clients_send_keep_alives and all(
                    client.last_keep_alive_s > -math.inf for client in missing
                )
                self._receive_next(missing, _NO_KEEP_ALIVE, can_time_out)

    def wait_for_step_requests(
        self, streaming: Sequence[RankConnection]
    ) -> dict[RankConnection, StepRequest]:
        """Wait for the step requests of clients that have streamed their gradients."""
        while missing := [c for c in streaming if c not in self._step_requests]:
            self._receive_next(missing, _NO_STEP)
        requests, self._step_requests = self._step_requests, {}
        return requests

    def raise_if_left(self, within_s: float = 0.0) -> None:
        """Raise RuntimeError if a client has left although the step in progress needs it.

        The gradients that it has not sent would be waited for until the timeout. If its connection
        is lost, ``within_s`` lets its last request arrive first, which has the reason.
        """
        deadline = time.monotonic() + within_s
        while True:
            for client, message in self._not_processed():
                if client in self.in_progress:
                    if isinstance(message, Exception):
                        return  # the wait for its tensors fails, and names it
                    if message.kind == MessageKind.LEAVE:
                        self._process(client, message)
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _not_processed(self) -> list[Arrived]:
        with self._arrived.mutex:
            return list(self._arrived.queue)

    def _receive_next(
        self, missing: Sequence[RankConnection], expected: str, can_time_out: bool = True
    ) -> None:
        """Process the next request; Unreachable if a client has timed out."""
        timeout_s = self._keep_alive.timeout_s if can_time_out else None
        try:
            received = self._keep_alive.get(
                self._arrived, timeout_s, lambda: max(c.last_keep_alive_s for c in missing)
            )
        except TimeoutError:
            assert timeout_s is not None
            # Of several that are missing, one that has sent a keep-alive waits for another rank.
            for client in missing:
                if time.monotonic() > client.last_keep_alive_s + timeout_s:
                    self.active.remove(client)
                    raise Unreachable(
                        f"{client.name}: no {expected.format(timeout_s)}. Check where it is, or "
                        "raise timeout_s."
                    ) from None
        else:
            self._process(*received)

    def _process(self, client: RankConnection, message: Message | Exception) -> None:
        if isinstance(message, Exception):
            self.active.remove(client)
            raise message
        if message.kind == MessageKind.LEAVE:
            self.active.remove(client)
            if "failure" in message.content:
                raise RuntimeError(f"{client.name} failed: {message.content['failure']}")
            if client in self.pending or client in self.in_progress:
                raise RuntimeError(f"{client.name} has left before the end of its step.")
            self.farewell = message.content.get("farewell") or self.farewell
        elif message.kind == MessageKind.STEP_REQUEST:
            self._step_requests[client] = StepRequest.from_dict(message.content["request"])
        else:
            # So that it receives keep-alives while it is replied to, which may read a whole state.
            self.in_progress.append(client)
            if not self._reply_directly(client, message):
                self.pending[client] = message
            self.in_progress.remove(client)

    # ---------------------------------------------------------- keep-alives, end

    def _send_keep_alives(self) -> None:
        # A client waits for its reply from the moment of its request, also while the main thread
        # waits for a gradient and has not looked at the request yet.
        arrived = [
            client
            for client, message in self._not_processed()
            if isinstance(message, Message) and message.kind != MessageKind.LEAVE
        ]
        for client in {*self.pending, *self.in_progress, *arrived}:
            client.try_send(MessageKind.REPLY, {"waiting": True})

    def send_failure(
        self, error: Exception, send_to_server: Callable[[str], list[dist.Work]]
    ) -> None:
        """Send the reason of a failure to all active clients.

        ``send_to_server`` starts to send it to the server that this server is a client of.
        """
        lines = str(error).strip().split("\n")
        text = " ".join([lines[0], *lines[1:][-1:]])[:_FAILURE_CHARACTERS]
        reply = {"failure": text}
        sends = [work for c in self.active for work in c.try_send(MessageKind.REPLY, reply)]
        sends += send_to_server(text)
        # Waited for, because a rank that ends at once takes what it has not sent with it.
        is_reported = isinstance(error, WorkerFailure) and not isinstance(error, Unreachable)
        deadline = time.monotonic() + (_REPORTED_FAILURE_S if is_reported else _FAILURE_S)
        for work in sends:
            left_s = max(deadline - time.monotonic(), _MIN_TIMEOUT_S)
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=left_s))

    def close(self) -> None:
        """Join the threads, with a short timeout for those that receive from a lost rank."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _receive(client: RankConnection, arrived: queue.Queue[Arrived]) -> None:
    """Receive the requests of a client until it leaves."""
    kind = None
    while kind != MessageKind.LEAVE:
        try:
            message = client.receive_request()
        except Exception as error:
            arrived.put((client, error))
            return
        kind = message.kind
        if kind == MessageKind.KEEP_ALIVE:
            client.last_keep_alive_s = time.monotonic()
        else:
            arrived.put((client, message))
