"""The client side of a server: requests that any client makes, and a worker's steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.background import TaskThread
from lightning_loco._util.fault_points import reach
from lightning_loco.distributed.devices import has_streams
from lightning_loco.parameter_server.buckets import BucketBuffer, ParamBucket, Tensors
from lightning_loco.parameter_server.changes import ChangeDetector
from lightning_loco.parameter_server.optimizer_state import HyperparameterSync, OptimizerState
from lightning_loco.parameter_server.protocol import (
    Message,
    MessageKind,
    MessageTag,
    RankConnection,
    StepRequest,
)


class ServerClient:
    """Reads and writes the parameters and the optimizer state of one server.

    ``shapes`` are tensors of the shapes and dtypes of the server's parameters.
    """

    def __init__(self, connection: RankConnection, shapes: Sequence[Tensor]) -> None:
        self.connection = connection
        self.shapes = shapes
        self._has_left = False

    def request(self, kind: MessageKind, content: dict[str, Any] | None = None) -> None:
        """Send a request; :meth:`wait_for_reply` returns the reply."""
        self.connection.send_request(Message(kind, content or {}))

    def ask(self, kind: MessageKind, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.request(kind, content)
        return self.wait_for_reply()

    def wait_for_reply(self) -> dict[str, Any]:
        """Wait for the server's reply to the last request.

        RuntimeError if it reports a failure; this rank then leaves.
        """
        reply = self.connection.receive_reply()
        while "waiting" in reply:  # a keep-alive: the server waits for another rank
            for server in self.connection.other_servers:
                server.try_send(MessageKind.KEEP_ALIVE, {})
            reply = self.connection.receive_reply()
        if "failure" in reply:
            # The server has ended, or will: a request that it does not read changes nothing.
            with suppress(RuntimeError):
                self.leave()
            raise RuntimeError(f"{self.connection.name}: {reply['failure']}")
        return reply

    def ask_for_weights(self, checksum: int) -> dict[str, Any]:
        """Request the parameters, which follow the reply.

        ValueError if the server's model has another checksum; RuntimeError if the server has ended
        or is later than the timeout.
        """
        reply = self.ask(MessageKind.WEIGHTS, {"checksum": checksum})
        if "hyperparameters" not in reply:
            raise ValueError(
                f"{self.connection.name} has a model with other parameters. Build the same model "
                "on all ranks, pass its parameters in the same order, and give all ranks the same "
                "Transport."
            )
        return reply

    def parameters(self) -> Iterable[Tensor]:
        """Request all parameters in full precision; yield them one after another."""
        self.ask(MessageKind.PARAMETERS)
        yield from self.connection.receive_all(self.shapes, "the parameters")

    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Replace the server's parameters."""
        self.request(MessageKind.LOAD_PARAMETERS)
        self.connection.send_all(values, "the parameters")
        self.wait_for_reply()

    def state(self) -> OptimizerState:
        """Request the optimizer's state; TypeError if it cannot be sent."""
        reply = self.ask(MessageKind.STATE)
        if "refused" in reply:
            raise TypeError(reply["refused"])
        return OptimizerState.receive(self.connection, reply)

    def load_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state."""
        state.send(self.connection, functools.partial(self.request, MessageKind.LOAD_STATE))
        self.wait_for_reply()

    def leave(self, farewell: dict[str, Any] | None = None, failure: str | None = None) -> None:
        """Notify the server that no more requests follow, once; later ones are not received.

        ``farewell`` are final values; ``failure`` is the error because of which it leaves.
        """
        if not self._has_left:
            self._has_left = True
            content = {"farewell": farewell} if failure is None else {"failure": failure}
            self.request(MessageKind.LEAVE, content)


class ShardClient(ServerClient):
    """A worker's client of one server: sends gradients of a shard and receives its parameters.

    They are in the server's order. A schedule may change the hyper-parameters of ``groups`` on this
    rank. Compression has saved ``bytes_saved`` of the gradients so far.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[ParamBucket],
        connection: RankConnection,
        checksum: int,
    ) -> None:
        super().__init__(connection, params)
        self._params = params
        self.bytes_saved = 0
        self._buffers = [BucketBuffer(bucket, params) for bucket in buckets]
        self._hyperparameters = HyperparameterSync(groups)
        self._checksum = checksum
        self._buckets_of: list[list[int]] = [[] for _ in params]
        for number, buffer in enumerate(self._buffers):
            for index in buffer.indices:
                self._buckets_of[index].append(number)
        device = params[0].device
        self._async_sender = AsyncSender(connection, device) if has_streams(device) else None
        self._sends: list[dist.Work | Future[dist.Work]] = []
        self._receives: list[dist.Work] = []
        self._missing_gradients: list[set[int]] = []
        self._sent_request: StepRequest | Future[StepRequest] = StepRequest()
        self._is_streaming = False
        self._changes = ChangeDetector(params)

    def join(self) -> None:
        """Request parameters and hyper-parameters; :meth:`receive_weights` finishes it."""
        self._hyperparameters.update(self.ask_for_weights(self._checksum)["hyperparameters"])
        self._start_receiving(self._params)

    # ------------------------------------------------------------------- steps

    def expect_gradients(self) -> None:
        """Prepare to send gradients as the next backward pass completes them."""
        self._missing_gradients = [set(buffer.indices) for buffer in self._buffers]

    def on_gradient_ready(self, index: int) -> None:
        """Send all buckets that are complete now that a parameter has its gradient.

        RuntimeError if it had one before in this backward pass.
        """
        for number in self._buckets_of[index]:
            if number < len(self._sends) or index not in self._missing_gradients[number]:
                raise RuntimeError(
                    "A parameter got its gradient twice in one backward pass (reentrant "
                    "checkpointing does that), after its first part may have been sent. "
                    "Use overlap=False."
                )
            self._missing_gradients[number].discard(index)
        # In order, because the server receives them so: a bucket that is complete early waits.
        while (
            len(self._sends) < len(self._buffers) and not self._missing_gradients[len(self._sends)]
        ):
            if not self._is_streaming:
                self._is_streaming = True
                self.request(MessageKind.STEP)
            self._send_next_bucket()

    def start_averaging(self, is_leader: bool) -> None:
        """Send all gradients, if this rank is the leader, and start to receive the mean."""
        request = StepRequest(missing=self._without_gradient())
        for param in self._params:
            # The mean is received into it, in the layout of the parameter.
            if param.grad is None or param.grad.stride() != param.stride():
                gradient = torch.zeros_like(param)
                param.grad = gradient if param.grad is None else gradient.copy_(param.grad)
        if is_leader:
            self.request(MessageKind.MEAN_GRADIENT, {"request": request.to_dict()})
            while len(self._sends) < len(self._buffers):
                self._send_next_bucket()
            self._start_receiving(self._gradients())

    def finish_averaging(self, broadcast: Callable[[Tensor], object], is_leader: bool) -> None:
        """Write the mean into the gradients; those that no worker has become None again.

        ``broadcast`` sends tensors from the worker's leader to its other ranks.
        """
        # The other ranks learn from a tensor which gradients none has: only tensors are broadcast.
        is_missing = torch.zeros(len(self._params), dtype=torch.bool, device="cpu")
        if is_leader:
            is_missing[self.wait_for_reply()["missing"]] = True
            self._wait_for_sends()
        broadcast(is_missing)
        self._receive(self._gradients(), broadcast)
        for index in is_missing.nonzero().flatten().tolist():
            self._params[index].grad = None

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param in self._params if param.grad is not None]

    def request_step(self, request: StepRequest) -> None:
        """Send the remaining gradients and the request, and start to receive parameters."""
        request = request._replace(
            missing=self._without_gradient(), hyperparameters=self._hyperparameters.changes()
        )
        if not self._is_streaming:
            self._sent_request = self._send_step_request(MessageKind.STEP, request)
        while len(self._sends) < len(self._buffers):
            self._send_next_bucket()
        if self._is_streaming:
            self._sent_request = self._send_step_request(MessageKind.STEP_REQUEST, request)
        # Now, since the server sends the first buckets before it has received the last gradients.
        self._start_receiving(self._params)

    def _without_gradient(self) -> tuple[int, ...]:
        return tuple(i for i, param in enumerate(self._params) if param.grad is None)

    def send_changed_parameters(self) -> None:
        """Send parameters that were changed outside the optimizer, if the server asks for them."""
        request = self._sent_request
        if isinstance(request, Future):
            request = request.result()
        if request.changed is not None and self.wait_for_reply()["give"]:
            self.connection.send_all(self._params, "the parameters")

    def wait_for_step(self) -> str | None:
        """Wait for the server's step; return why all workers should stop, or None."""
        reply = self.wait_for_reply()
        self._wait_for_sends()
        self._missing_gradients, self._is_streaming = [], False
        self._hyperparameters.update(reply.get("hyperparameters"))
        return reply.get("stop")

    def receive_weights(self, broadcast: Callable[[Tensor], object]) -> None:
        """Write the parameters as they arrive.

        ``broadcast`` sends each bucket from the worker's leader, who has received it, to the
        worker's other ranks.
        """
        self._receive(self._params, broadcast)
        self._changes.record()

    def load_current_weights(self, broadcast: Callable[[Tensor], object], is_leader: bool) -> None:
        """Load the parameters after steps that this worker took no part in.

        The leader requests them; ``broadcast`` overwrites the parameters on the other ranks.
        """
        values = (
            self.parameters()
            if is_leader
            else (
                torch.empty(param.shape, dtype=param.dtype, device="cpu") for param in self._params
            )
        )
        for param, value in zip(self._params, values, strict=True):
            broadcast(value)
            param.copy_(value)
        # As after a step, where parameters arrive encoded: all workers must have equal values.
        for buffer in self._buffers:
            buffer.round_trip(self._params)
        self._changes.record()

    def _send_step_request(
        self, kind: MessageKind, request: StepRequest
    ) -> StepRequest | Future[StepRequest]:
        if self._async_sender is not None:
            return self._async_sender.send_request(kind, request, self._changes)
        request = request._replace(changed=self._changes.changed_checksum())
        self.request(kind, {"request": request.to_dict()})
        return request

    def _send_next_bucket(self) -> None:
        reach("packing")
        buffer = self._buffers[len(self._sends)]
        self.bytes_saved += buffer.saved_bytes
        gradients = {index: self._params[index].grad for index in buffer.indices}
        self._sends.append(
            self.connection.send(buffer.pack(gradients), MessageTag.GRADIENTS)
            if self._async_sender is None
            else self._async_sender.send(buffer, gradients)
        )

    def _start_receiving(self, tensors: Sequence[Tensor]) -> None:
        self._receives = [
            self.connection.receive(buffer.receive_buffer(tensors), MessageTag.WEIGHTS)
            for buffer in self._buffers
        ]

    def _receive(self, tensors: Sequence[Tensor], broadcast: Callable[[Tensor], object]) -> None:
        for number, buffer in enumerate(self._buffers):
            if self._receives:
                self.connection.wait(self._receives[number], "the parameters")
            broadcast(buffer.receive_buffer(tensors))
            buffer.unpack(tensors)
        self._receives = []

    def _wait_for_sends(self) -> None:
        for send in self._sends:
            work = send.result() if isinstance(send, Future) else send
            self.connection.wait(work, "the gradients")
        self._sends = []

    # ------------------------------------------------------------ other requests

    @property
    def has_changed_parameters(self) -> bool:
        """Whether parameters were changed outside the optimizer since the last step."""
        return self._changes.changed_checksum() is not None

    def are_finite(self, here: bool) -> bool:
        """Return whether the gradients of all workers are finite, and those ``here``."""
        return bool(self.ask(MessageKind.FINITE, {"finite": here})["finite"])

    def request_sync_point(self, purpose: str, stop: str | None) -> None:
        """Notify the server of a sync point; call :meth:`wait_for_sync_point` afterwards."""
        content = {"purpose": purpose, "stop": stop, "changed": self._changes.changed_checksum()}
        self.request(MessageKind.SYNC_POINT, content)

    def wait_for_sync_point(self) -> dict[str, Any]:
        """Wait until all workers are at the sync point; return the server's reply."""
        reply = self.wait_for_reply()
        if "give" in reply:  # asked of workers that have taken the last step, for those behind
            if reply["give"]:
                self.connection.send_all(self._params, "the parameters")
            reply = self.wait_for_reply()
        return reply

    def close(self) -> None:
        """End the thread that sends, if there is one."""
        if self._async_sender is not None:
            self._async_sender.close()

    def release(self) -> None:
        """Drop the references to the connection; nothing can be sent or received afterwards."""
        self._sends, self._receives = [], []
        self.connection.release()


class AsyncSender:
    """Sends gradients of a GPU without blocking: a stream copies them, a thread sends copies."""

    def __init__(self, connection: RankConnection, device: torch.device) -> None:
        self._connection = connection
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = TaskThread("loco-sender")

    def send(self, buffer: BucketBuffer, gradients: Tensors) -> Future[dist.Work]:
        """Start to send a bucket; its buffer must not be used before the send is done."""
        host, copied = buffer.pack_async(gradients, self._stream)

        def send() -> dist.Work:
            copied.synchronize()
            return self._connection.send(host, MessageTag.GRADIENTS)

        return self._thread.submit(send)

    def send_request(
        self, kind: MessageKind, request: StepRequest, changes: ChangeDetector
    ) -> Future[StepRequest]:
        """Send a request after the buckets before it, with the checksum of changed parameters."""
        checksum = changes.start_checksum(self._stream)

        def send() -> StepRequest:
            complete = request._replace(changed=checksum())
            self._connection.send_request(Message(kind, {"request": complete.to_dict()}))
            return complete

        return self._thread.submit(send)

    def close(self) -> None:
        """End the thread when everything is sent."""
        self._thread.end()
