"""A server: receives the clients' gradients, lets a backend step and sends parameters."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.costs.server_times import PREFETCH_BYTES
from lightning_loco.parameter_server.backends import Backend
from lightning_loco.parameter_server.buckets import Accumulator, ParamBucket
from lightning_loco.parameter_server.clients import Clients
from lightning_loco.parameter_server.keep_alive import JOIN_TIMEOUT_S, KeepAlive
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import (
    Message,
    MessageKind,
    MessageTag,
    RankConnection,
    StepRequest,
    Unreachable,
)

_ALIGNMENT = 8


class GradientServer:
    """Serves clients in lockstep until all have left.

    A step uses the mean over the clients that take part in it. Clients at a sync point, for example
    before a validation, wait until no other client takes steps.

    Args:
        clients: The ranks that send gradients, in the order of the sum.
        buckets: The buckets in which they send them.
        accumulator: Memory for the sum.
        backend: Takes the steps with the mean.
        checksum: Checksum of the model, equal on all clients.
        keep_alive: Sends keep-alives during waits. ``keep_alive.timeout_s`` limits, in seconds, how
            much later than the first client another one may take a step.
        clients_send_keep_alives: Whether clients send keep-alives whenever they wait, as servers
            do.
        stop_reason: Returns why all should stop, if this rank was asked to.
    """

    def __init__(
        self,
        clients: Sequence[RankConnection],
        buckets: Sequence[ParamBucket],
        accumulator: Accumulator,
        backend: Backend,
        checksum: int,
        keep_alive: KeepAlive,
        *,
        clients_send_keep_alives: bool = False,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        # Not a method of self: a reference cycle would keep the process group alive.
        reply_directly = functools.partial(_reply_directly, backend)
        self._clients = Clients(clients, reply_directly, keep_alive, clients_send_keep_alives)
        self._buckets = buckets
        self._mean_gradient = MeanGradient(clients, buckets, accumulator)
        self._backend = backend
        self._checksum = checksum
        self._stop_reason = stop_reason
        # Clients at a sync point have no part in the steps of the others, and older parameters.
        self._behind: set[RankConnection] = set()
        self._not_finite: str | None = None

    @torch.no_grad()
    def serve(self) -> dict[str, Any]:
        """Serve until all clients have left; return the final values that one has sent.

        ValueError if a client has another model; RuntimeError if one has ended or timed out, or
        requests something else than the others.
        """
        try:
            while self._clients.active:
                self._clients.wait_for_all()
                self._handle_requests()
        except Exception as error:
            self._clients.send_failure(error, self._backend.try_fail)
            raise
        finally:
            self._clients.close()
        self._backend.leave(self._clients.farewell)
        return self._clients.farewell

    def _handle_requests(self) -> None:
        if not self._clients.active:
            return
        pending = {client: self._clients.pending[client] for client in self._clients.active}
        messages = {c: m for c, m in pending.items() if m.kind != MessageKind.SYNC_POINT}
        kinds = {message.kind for message in messages.values()}
        if len(kinds) > 1:
            raise RuntimeError(
                "Workers send different requests: "
                + ", ".join(f"{c.name} {message.kind.name}" for c, message in messages.items())
                + ". Call receive_weights on all of them before the first step, and run the same "
                "backward passes on all before each step."
            )
        if not messages:
            self._finish_sync_point()
            return
        for client in messages:
            del self._clients.pending[client]
        self._clients.in_progress = list(messages)
        if kinds == {MessageKind.FINITE}:
            finite = all(message.content["finite"] for message in messages.values())
            for client in messages:
                client.send_reply({"finite": finite})
            self._clients.in_progress = []
            return
        if kinds == {MessageKind.WEIGHTS}:
            sends = self._send_initial_weights(messages)
        elif kinds == {MessageKind.MEAN_GRADIENT}:
            sends = self._send_mean_gradient(messages)
        else:
            sends = self._make_step(messages)
        self._clients.in_progress = []
        # Before the gradients of the next step, which are received into the memory that is sent.
        for wait in [client.start_wait(work, "the parameters") for client, work in sends]:
            wait()
        self._mean_gradient.start_receiving(messages)

    def _send_initial_weights(self, messages: dict[RankConnection, Message]) -> list[ClientSend]:
        """Send the parameters to clients at their start."""
        others = [c for c, m in messages.items() if m.content["checksum"] != self._checksum]
        for client in others:
            client.send_reply({})
        if others:
            names = ", ".join(client.name for client in others)
            raise ValueError(f"Another model on: {names}. Build the same on all ranks.")
        reply = self._backend.join(self._checksum)
        sends = self._send_weights(messages, range(len(self._buckets)))
        for client in messages:
            client.send_reply(reply)
        return sends

    # ------------------------------------------------------------------- steps

    def _send_mean_gradient(self, messages: dict[RankConnection, Message]) -> list[ClientSend]:
        """Send clients the mean of their gradients, which they may change before the step.

        It need not be finite, as in DDP: a hook may replace such a gradient, or a scaler skip the
        step. If it is still not finite in the step, the error names the workers that sent it.
        """
        requests = [StepRequest.from_dict(m.content["request"]) for m in messages.values()]
        sends: list[ClientSend] = []
        self._not_finite = None
        for index, bucket in enumerate(self._buckets):
            mean, text = self._reduce(index, messages)
            self._not_finite = self._not_finite or text
            sends += _send(messages, bucket.as_sent(mean))
        for client in messages:
            client.send_reply({"missing": StepRequest.merge(requests).missing})
        return sends

    def _reduce(self, index: int, clients: Iterable[RankConnection]) -> tuple[Tensor, str | None]:
        """Average a bucket of the gradients; RuntimeError if a client leaves without sending it."""
        try:
            return self._mean_gradient.reduce(index, clients)
        except Unreachable:
            self._clients.raise_if_left(JOIN_TIMEOUT_S)
            raise

    def _make_step(self, messages: dict[RankConnection, Message]) -> list[ClientSend]:
        """Reduce gradients, take the step and send parameters, bucket by bucket where possible."""
        requests = {
            client: StepRequest.from_dict(message.content["request"])
            for client, message in messages.items()
            if "request" in message.content
        }
        streaming = [client for client in messages if client not in requests]
        # Parameters that a worker has changed must be loaded before any of them is stepped.
        is_known = not streaming and not any(request.changed for request in requests.values())
        self._backend.start_step(StepRequest.merge(list(requests.values())) if is_known else None)
        sends: list[ClientSend] = []
        not_finite, self._not_finite = self._not_finite, None
        for index in range(len(self._buckets)):
            reach("summing")
            _, text = self._reduce(index, messages)
            if text is not None:
                raise RuntimeError(not_finite or text)
            sends += self._send_weights(messages, self._backend.add_bucket(index))
        requests |= self._clients.wait_for_step_requests(streaming)
        # In the order of the clients: of requests that differ, the first one counts.
        requests = {client: requests[client] for client in messages}
        self._load_changes({client: request.changed for client, request in requests.items()})
        request = StepRequest.merge(list(requests.values()))
        reach("server step")
        reply = self._backend.finish_step(request)
        reply["stop"] = request.stop or reply.get("stop") or self._stop_reason()
        for index in self._backend.remaining():
            if index == len(self._buckets) - 1:
                # All parameters are known: a client with a reply waits for no other rank.
                for client in messages:
                    client.send_reply(reply)
            sends += self._send_weights(messages, [index])
        self._behind.update(client for client in self._clients.active if client not in messages)
        # The others stop after this step, and will not come to the sync point.
        if reply["stop"]:
            self._release_sync_point(reply["stop"])
        return sends

    def _send_weights(
        self, clients: Iterable[RankConnection], indices: Iterable[int]
    ) -> list[ClientSend]:
        """Start to send the parameters of buckets as they become known."""
        return [send for i in indices for send in _send(clients, self._backend.weights(i))]

    def _load_changes(self, checksums: Mapping[RankConnection, str | None]) -> None:
        """Load parameters that all workers have changed in the same way outside the optimizer.

        A worker with changes, which has sent a checksum, waits for a reply that says whether to
        send its parameters. RuntimeError unless all have made the same change.
        """
        if not any(checksums.values()):
            return
        _check_changes({client.name: found for client, found in checksums.items()})
        first, *others = checksums
        first.send_reply({"give": True})
        self._backend.load_parameters(first.receive_all(self._backend.shapes, "the parameters"))
        for client in others:
            client.send_reply({"give": False})

    # ------------------------------------------------------------- sync points

    def _finish_sync_point(self) -> None:
        pending = self._clients.pending
        purposes = {message.content["purpose"] for message in pending.values()}
        if len(purposes) > 1:
            raise RuntimeError(
                "Workers wait for each other at different sync points: "
                + ", ".join(f"{c.name} at {m.content['purpose']}" for c, m in pending.items())
                + ". All must reach the same validations and checkpoints."
            )
        stops = [message.content.get("stop") for message in pending.values()]
        # Those that are behind read the server's parameters next, with the changes that the others
        # have made since. Without any, changes are sent with the next step.
        if self._behind:
            current = {c: m for c, m in pending.items() if c not in self._behind}
            self._load_changes({c: m.content["changed"] for c, m in current.items()})
        self._release_sync_point(next(filter(None, [*stops, self._stop_reason()]), None))

    def _release_sync_point(self, stop: str | None) -> None:
        """Reply to all clients at a sync point."""
        waiting, self._clients.pending = list(self._clients.pending), {}
        for client in waiting:
            client.send_reply({"stop": stop, "behind": client in self._behind})
            self._behind.discard(client)


def _check_changes(checksums: Mapping[str, str | None]) -> None:
    """Raise RuntimeError unless all workers have changed parameters in the same way, or none has.

    ``checksums`` maps names of workers to checksums of their parameters, None if unchanged.
    """
    if len(set(checksums.values())) < 2:
        return
    changed = [name for name, found in checksums.items() if found is not None]
    if len(changed) < len(checksums):
        others = [name for name in checksums if name not in changed]
        how = f"on {_names(changed)} but not on {_names(others)}"
    else:
        how = f"on {_names(changed)}, but not to the same values"
    raise RuntimeError(
        f"Parameters were changed outside of the optimizer {how}. Change them alike on all "
        "workers, with the same random numbers, or not at all."
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(name[0].lower() + name[1:] for name in names)


def _reply_directly(backend: Backend, client: RankConnection, message: Message) -> bool:
    """Reply to a request that concerns its client alone; return whether it was one.

    These are about the optimizer's state and all parameters in full precision.
    """
    if message.kind == MessageKind.STATE:
        try:
            state = backend.state()
        except TypeError as error:  # concerns the client only
            client.send_reply({"refused": str(error)})
        else:
            state.send(client, client.send_reply)
    elif message.kind == MessageKind.LOAD_STATE:
        backend.load_state(OptimizerState.receive(client, message.content))
        client.send_reply({})
    elif message.kind == MessageKind.PARAMETERS:
        client.send_reply({})
        client.send_all(backend.parameters(), "the parameters")
    elif message.kind == MessageKind.LOAD_PARAMETERS:
        backend.load_parameters(client.receive_all(backend.shapes, "the parameters"))
        client.send_reply({})
    else:
        return False
    return True


ClientSend = tuple[RankConnection, dist.Work]
"""A client, and an asynchronous send to it."""


def _send(clients: Iterable[RankConnection], tensor: Tensor) -> list[ClientSend]:
    """Start to send the same parameters or gradients to several clients."""
    return [(client, client.send(tensor, MessageTag.WEIGHTS)) for client in clients]


class MeanGradient:
    """Receives the clients' gradients and averages them, bucket by bucket, in their order."""

    def __init__(
        self,
        clients: Sequence[RankConnection],
        buckets: Sequence[ParamBucket],
        accumulator: Accumulator,
    ) -> None:
        self._buckets = buckets
        self._accumulator = accumulator
        self._receivers = {
            client: GradientReceiver(client, buckets, accumulator, number == 0)
            for number, client in enumerate(clients)
        }

    def start_receiving(self, senders: Iterable[RankConnection]) -> None:
        """Start to receive the gradients of some clients' next step."""
        for client in senders:
            self._receivers[client].start()

    def reduce(self, index: int, senders: Iterable[RankConnection]) -> tuple[Tensor, str | None]:
        """Write the mean gradient of a bucket, over the senders, into the accumulator.

        Returns it, and a text that names the workers with infinite or NaN values if it has any.
        """
        bucket, total = self._buckets[index], self._accumulator.buckets[index]
        received: list[tuple[str, Tensor]] = []
        for client in senders:
            encoded = self._receivers[client].next()
            # Always in the order of the clients: sums of floats depend on it.
            if received:
                bucket.add_decoded(encoded, total)
            elif encoded is not total:
                bucket.decode(encoded, total)
            received.append((client.name, encoded))
        if len(received) > 1:
            _divide(total, len(received))
        is_finite = _is_finite(total)
        return total, None if is_finite else _not_finite_text(bucket, received, total)


class GradientReceiver:
    """Receives one client's buckets ahead of the one that is summed, also before a step starts.

    Buckets of the first client are received into the accumulator, if they are sent in its dtype.
    Those of the others are received into a ring of at least two buffers.
    """

    def __init__(
        self,
        client: RankConnection,
        buckets: Sequence[ParamBucket],
        accumulator: Accumulator,
        is_first: bool,
    ) -> None:
        self._client = client
        self._buckets = buckets
        self._accumulator = accumulator
        self._is_direct = is_first and all(b.wire_dtype == accumulator.dtype for b in buckets)
        self._buffer_bytes = -(-max(b.num_bytes for b in buckets) // _ALIGNMENT) * _ALIGNMENT
        self._num_buffers = min(len(buckets), max(2, PREFETCH_BYTES // self._buffer_bytes))
        self._memory: Tensor | None = None
        self._receives: deque[tuple[Tensor, dist.Work]] = deque()
        self._waits: deque[tuple[Tensor, Callable[[], None]]] = deque()
        self._error: Unreachable | None = None
        self._next = len(buckets)

    def start(self) -> None:
        """Start to receive the buckets of the next step, if the client will make one."""
        self._next = 0
        self._receive_ahead()

    def next(self) -> Tensor:
        """Wait for the next bucket of this step; return its memory, valid until the next call.

        Unreachable if the client has ended or timed out.
        """
        self._start_waits()
        if not self._waits:
            assert self._error is not None
            raise self._error
        memory, wait = self._waits.popleft()
        wait()
        self._receive_ahead()
        self._start_waits()
        return memory

    def _start_waits(self) -> None:
        """Start to wait for buckets; only during a step are they sure to arrive."""
        while self._receives:
            memory, work = self._receives.popleft()
            self._waits.append((memory, self._client.start_wait(work, "its gradients")))

    def _receive_ahead(self) -> None:
        while self._next < len(self._buckets) and (
            self._is_direct
            or len(self._receives) + len(self._waits) < self._num_buffers - 1
            or self._num_buffers == 1
        ):
            memory = self._memory_of(self._next)
            self._next += 1
            try:
                self._receives.append((memory, self._client.receive(memory, MessageTag.GRADIENTS)))
            except Unreachable as error:
                self._error = error
                self._next = len(self._buckets)

    def _memory_of(self, index: int) -> Tensor:
        if self._is_direct:
            return self._accumulator.buckets[index]
        bucket = self._buckets[index]
        if self._memory is None:
            self._memory = torch.empty(
                self._num_buffers, self._buffer_bytes, dtype=torch.uint8, device="cpu"
            )
        buffer = self._memory[index % self._num_buffers, : bucket.num_bytes]
        return buffer.view(bucket.wire_dtype)


def _divide(values: Tensor, count: int) -> None:
    """Divide in place; multiplying by 1 / count is faster, and exact for a power of two."""
    if count & (count - 1) == 0:
        values.mul_(1 / count)
    else:
        values.div_(count)


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite; if their sum is, one pass is enough."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def _not_finite_text(
    bucket: ParamBucket, received: Sequence[tuple[str, Tensor]], mean: Tensor
) -> str:
    """Return an error message that names the clients whose gradients are not finite.

    The mean may have overwritten the first client's gradient; it is named if no other one is.
    """
    names = [
        name
        for name, memory in received
        if memory is not mean and not _is_finite(bucket.decode(memory, torch.empty_like(mean)))
    ]
    if not names and received[0][1] is mean:
        names = [received[0][0]]
    return (
        f"{', '.join(names) or 'The sum over all workers'}: a gradient is not finite (infinite or "
        "NaN), and would have made the parameters of all workers so. Check the data and the loss "
        "there, or clear the gradients of such a step in on_after_backward."
    )
