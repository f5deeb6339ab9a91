"""Steps of an optimizer on another rank than the server that averages (3 tiers)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.asking import (
    ask_for_parameters,
    ask_for_state,
    ask_for_weights,
    check_answer,
    send_parameters,
)
from lightning_loco.remote.calls import Call
from lightning_loco.remote.message import Message
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.wire import Kind, Lane, Note, Sending, Wire

LAG = 2


class RemoteBackend:
    """Has a server's steps made on another rank, which is asked as a worker asks.

    Args:
        wire: To that rank.
        params: Their shapes.
        messages: As the workers cut them; this is how parameters come back.
        accumulator: Where the gradients are. A message's parameters come into the memory from which
            its gradient leaves, which is free by then: the answer to a message follows its arrival.
    """

    def __init__(
        self,
        wire: Wire,
        params: Sequence[Tensor],
        messages: Sequence[Message],
        accumulator: Accumulator,
    ) -> None:
        self._wire = wire
        self.shapes = params
        self._accumulator = accumulator
        self._messages = messages
        self._memory = [
            accumulator.lend(index, message.dtype)
            if message.codec is None
            else torch.empty(message.num_bytes, dtype=torch.uint8)
            for index, message in enumerate(messages)
        ]
        self._sending: list[dist.Work] = []
        self._receiving: list[dist.Work] = []
        self._steps_at_once = self._is_streaming = self._is_early = False
        self._next = self._known = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Ask the other rank for the parameters and wait for them."""
        answer = ask_for_weights(self._wire, checksum)
        self._steps_at_once = answer["steps_at_once"]
        for memory in self._memory:
            self._wire.wait(self._wire.receive(memory, Lane.WEIGHTS), "the parameters")
        return answer

    def begin(self, call: Call | None) -> None:
        """Announce to the other rank that gradients follow."""
        self._next = self._known = 0
        self._is_streaming = call is None
        self._is_early = call is not None and call.clip is None and self._steps_at_once
        kind = Kind.STREAM if call is None else Kind.STEP
        self._wire.ask(Note(kind, {} if call is None else call.content()))

    def push(self, index: int) -> Iterable[int]:
        """Pass the mean gradient on; parameters are awaited some messages later."""
        message, memory = self._messages[index], self._memory[index]
        gradient = message.write(self._accumulator.slices[index], memory)
        self._sending.append(self._wire.send(gradient, Lane.GRADIENTS))
        self._receiving.append(self._wire.receive(memory, Lane.WEIGHTS))
        if any(span.stop == self.shapes[span.param].numel() for span in message.spans):
            self._known = index + 1  # the other rank steps whole parameters
        return self._arrivals(min(index - LAG + 1, self._known)) if self._is_early else ()

    def finish(self, call: Call) -> dict[str, Any]:
        """Say what the workers want, unless :meth:`begin` did, and wait for the step."""
        if self._is_streaming:
            self._wire.ask(Note(Kind.CALL, call.content()))
        return check_answer(self._wire)

    def remaining(self) -> Iterable[int]:
        """Wait for the parameters that have not come yet; the gradients are there by then."""
        yield from self._arrivals(len(self._memory))
        self._sending, self._receiving = [], []

    def _arrivals(self, stop: int) -> Iterable[int]:
        for index in range(self._next, stop):
            self._wire.wait(self._receiving[index], "the parameters after a step")
            self._next = index + 1
            yield index

    def weights(self, index: int) -> Tensor:
        """The parameters of a message, as they came from the other rank."""
        return self._memory[index]

    def state(self) -> OptimizerState:
        """Ask the other rank for the state of its optimizer."""
        return ask_for_state(self._wire)

    def load_state(self, state: OptimizerState) -> None:
        """Pass a state on to the other rank's optimizer."""
        state.send(self._wire, lambda text: self._wire.ask(Note(Kind.LOAD_STATE, text)))
        check_answer(self._wire)

    def parameters(self) -> Iterable[Tensor]:
        """Ask the other rank for all parameters in full precision."""
        return ask_for_parameters(self._wire, self.shapes)

    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Pass other parameters on to the other rank's optimizer."""
        self._wire.ask(Note(Kind.LOAD_PARAMETERS, {}))
        send_parameters(self._wire, values)
        check_answer(self._wire)

    def end(self, farewell: dict[str, Any]) -> None:
        """Tell the other rank that all workers have left."""
        self._wire.ask(Note(Kind.LEAVE, farewell))

    def fail(self, text: str) -> list[Sending]:
        """Begin to tell the other rank, if it is there, why nothing more comes."""
        return self._wire.last_request(Note(Kind.FAIL, {"text": text}))
