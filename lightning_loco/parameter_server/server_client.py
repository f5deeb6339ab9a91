"""A worker's side of one server: gradients leave, parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.devices import has_streams
from lightning_loco.fault_points import reach
from lightning_loco.parameter_server.asking import ServerClient, send_parameters
from lightning_loco.parameter_server.buckets import Message
from lightning_loco.parameter_server.changes import ChangeWatch
from lightning_loco.parameter_server.protocol import Kind, Lane, Note, Wire
from lightning_loco.parameter_server.slots import Slot, Tensors
from lightning_loco.parameter_server.step_request import Call, HyperparameterMirror


class Courier:
    """Copies messages into the processor's memory on a stream of its own, and sends them in order.

    Nothing is waited for on the caller's thread: a thread sends each message when its copy is done.

    Args:
        wire: To the receiver.
        device: Where the messages are.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loco-courier")

    def send(self, slot: Slot, tensors: Tensors, lane: Lane) -> Future[dist.Work]:
        """Begin to send what the tensors hold; its buffer must not be used before that is done.

        Returns:
            The sending, once it has begun.
        """
        host, copied = slot.stage(tensors, self._stream)
        return self._thread.submit(self._send, host, copied, lane)

    def ask(self, kind: Kind, call: Call, watch: ChangeWatch) -> Future[Call]:
        """Send a request, in its turn, with what is known by then of changes by hand.

        Returns:
            The wishes that were sent, once they are.
        """
        digest = watch.begin_digest(self._stream)

        def send() -> Call:
            complete = call._replace(changed=digest())
            self._wire.ask(Note(kind, complete.content()))
            return complete

        return self._thread.submit(send)

    def end(self) -> None:
        """End the thread when all has been sent."""
        self._thread.shutdown(wait=False)

    def _send(self, host: Tensor, copied: torch.cuda.Event, lane: Lane) -> dist.Work:
        copied.synchronize()
        return self._wire.send(host, lane)


class Channel(ServerClient):
    """Exchanges a share of the parameters with the server that has them.

    Args:
        params: The share, in the server's order.
        groups: Where the hyper-parameters are that a schedule may change here.
        messages: How the share is cut.
        wire: To the server.
        checksum: Tells the model.

    Attributes:
        bytes_saved: By how much more gradients would have taken without compression.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        messages: Sequence[Message],
        wire: Wire,
        checksum: int,
    ) -> None:
        super().__init__(wire, params)
        self._params = params
        self.bytes_saved = 0
        self._slots = [Slot(message, params) for message in messages]
        self._mirror = HyperparameterMirror(groups)
        self._checksum = checksum
        self._messages_of: list[list[int]] = [[] for _ in params]
        for number, slot in enumerate(self._slots):
            for index in slot.indices:
                self._messages_of[index].append(number)
        device = params[0].device
        self._courier = Courier(wire, device) if has_streams(device) else None
        self._sending: list[dist.Work | Future[dist.Work]] = []
        self._receiving: list[dist.Work] = []
        self._awaited: list[set[int]] = []
        self._asked: Call | Future[Call] = Call()
        self._is_streaming = False
        self._watch = ChangeWatch(params)

    def join(self) -> None:
        """Ask for the parameters and hyper-parameters; :meth:`take_over` ends it."""
        self._mirror.take_over(self.ask_for_weights(self._checksum)["hyperparameters"])
        self._receive()

    def expect_gradients(self) -> None:
        """Be ready to send gradients: a backward pass begins that completes them."""
        self._awaited = [set(slot.indices) for slot in self._slots]

    def has_gradient(self, index: int) -> None:
        """Send what is complete now that this parameter has its gradient.

        Raises:
            RuntimeError: If it had one before, in this pass.
        """
        for number in self._messages_of[index]:
            if number < len(self._sending) or index not in self._awaited[number]:
                raise RuntimeError(
                    "A parameter got its gradient twice in one backward pass (reentrant "
                    "checkpointing does that), after its first part may have been sent. "
                    "Use overlap=False."
                )
            self._awaited[number].discard(index)
        while len(self._sending) < len(self._slots) and not self._awaited[len(self._sending)]:
            if not self._is_streaming:
                self._is_streaming = True
                self.wire.ask(Note(Kind.STREAM, {}))
            self._send_next()

    def ask_for_step(self, call: Call) -> None:
        """Send the gradients that are still here, and be ready for the parameters."""
        call = call._replace(
            missing=tuple(i for i, param in enumerate(self._params) if param.grad is None),
            hyperparameters=self._mirror.changes(),
        )
        if not self._is_streaming:
            self._asked = self._ask(Kind.STEP, call)
        while len(self._sending) < len(self._slots):
            self._send_next()
        if self._is_streaming:
            self._asked = self._ask(Kind.CALL, call)
        self._receive()

    def _ask(self, kind: Kind, call: Call) -> Call | Future[Call]:
        if self._courier is not None:
            return self._courier.ask(kind, call, self._watch)
        call = call._replace(changed=self._watch.digest())
        self.wire.ask(Note(kind, call.content()))
        return call

    def tell_changes(self) -> None:
        """Send parameters that were changed by hand, if this worker is the one that should."""
        call = self._asked.result() if isinstance(self._asked, Future) else self._asked
        if call.changed is not None:
            self._give(self.answer())

    def finish_step(self) -> str | None:
        """Wait until the step is made; :meth:`take_over` ends it.

        Returns:
            Why to stop, if all should.
        """
        answer = self.answer()
        for sending in self._sending:
            work = sending.result() if isinstance(sending, Future) else sending
            self.wire.wait(work, "the gradients")
        self._sending, self._awaited, self._is_streaming = [], [], False
        self._mirror.take_over(answer.get("hyperparameters"))
        return answer.get("stop")

    def take_over(self, share: Callable[[Tensor], object]) -> None:
        """Write the parameters as they come.

        Args:
            share: Called with each message, in order.
        """
        for slot, work in zip(self._slots, self._receiving, strict=True):
            self.wire.wait(work, "the parameters")
            share(slot.incoming(self._params))
            slot.unpack(self._params)
        self._receiving = []
        self._watch.note()

    def follow(self, share: Callable[[Tensor], object]) -> None:
        """Take over what another rank of this worker shares."""
        for slot in self._slots:
            share(slot.incoming(self._params))
            slot.unpack(self._params)
        self._watch.note()

    def catch_up(self, share: Callable[[Tensor], object], leads: bool) -> None:
        """Take over the parameters after steps that this worker had no part in.

        Args:
            share: Called with each parameter, in order.
            leads: Whether this rank asks; else ``share`` gives it the values.
        """
        values = (
            self.parameters()
            if leads
            else (torch.empty(param.shape, dtype=param.dtype) for param in self._params)
        )
        for param, value in zip(self._params, values, strict=True):
            share(value)
            param.copy_(value)
        for slot in self._slots:
            slot.round(self._params)
        self._watch.note()

    @property
    def is_changed(self) -> bool:
        """Whether parameters were changed by hand since the last step."""
        return self._watch.digest() is not None

    def are_finite(self, here: bool) -> bool:
        """Whether the gradients of all workers are finite."""
        self.wire.ask(Note(Kind.FINITE, {"finite": here}))
        return bool(self.answer()["finite"])

    def ask_for_sync_point(self, purpose: str, stop: str | None) -> None:
        """Say that this worker waits until no worker makes steps; :meth:`sync_point` waits."""
        content = {"purpose": purpose, "stop": stop, "changed": self._watch.digest()}
        self.wire.ask(Note(Kind.MEET, content))

    def sync_point(self) -> dict[str, Any]:
        """Wait until no worker makes steps; returns the server's answer."""
        answer = self.answer()
        if "give" in answer:
            self._give(answer)
            answer = self.answer()
        return answer

    def fail(self, text: str) -> None:
        """Tell the server that no more requests will come, because of an error."""
        self.wire.ask(Note(Kind.FAIL, {"text": text}))

    def end(self) -> None:
        """End the thread that sends, if there is one."""
        if self._courier is not None:
            self._courier.end()

    def let_go(self) -> None:
        """Keep nothing of the connection: no more messages can be exchanged."""
        self._sending, self._receiving = [], []
        self.wire.let_go()

    def _give(self, answer: dict[str, Any]) -> None:
        if answer["give"]:
            send_parameters(self.wire, self._params)

    def _send_next(self) -> None:
        reach("packing")
        slot = self._slots[len(self._sending)]
        self.bytes_saved += slot.saved_bytes
        gradients = {index: self._params[index].grad for index in slot.indices}
        self._sending.append(
            self.wire.send(slot.outgoing(gradients), Lane.GRADIENTS)
            if self._courier is None
            else self._courier.send(slot, gradients, Lane.GRADIENTS)
        )

    def _receive(self) -> None:
        self._receiving = [
            self.wire.receive(slot.incoming(self._params), Lane.WEIGHTS) for slot in self._slots
        ]
