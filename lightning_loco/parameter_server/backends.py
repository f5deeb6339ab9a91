"""What makes a server's steps: an optimizer in its process, or a connection to one elsewhere.

Both take in the mean gradient message by message, and know the parameters after the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.parameter_server.asking import ServerClient
from lightning_loco.parameter_server.buckets import Accumulator, Message
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import Kind, Lane, Note, Sending, Wire
from lightning_loco.parameter_server.slots import Slot
from lightning_loco.parameter_server.step_request import Call, Clip, HyperparameterMirror

LAG = 2


class LocalBackend:
    """Makes a server's steps with an optimizer in the same process.

    Where the step of a parameter depends on its own gradient alone and nothing has to be known
    about all gradients, parameters step as soon as their gradients are there.

    Args:
        optimizer: Of these parameters, and perhaps of others that stay without gradient.
        params: In the order of the workers.
        messages: How they are cut.
        accumulator: Where the gradients are. After the step the parameters leave from there.
        after_step: Called after each step, to step a schedule for instance.
        share_norms: Exchanges the norms of the parameters' gradients with the optimizers of the
            other servers; returns all of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        messages: Sequence[Message],
        accumulator: Accumulator,
        after_step: Callable[[], object] | None = None,
        share_norms: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self.shapes = params
        self._optimizer = optimizer
        self._params = params
        self._slots = [
            Slot(message, params, accumulator.lend(index, message.dtype))
            for index, message in enumerate(messages)
        ]
        self._accumulator = accumulator
        self._after_step = after_step
        self._share_norms = share_norms
        self._mirror = HyperparameterMirror(optimizer.param_groups)
        self._steps_at_once = is_step_per_parameter(optimizer)
        self._early: Call | None = None
        self._next = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Have the parameters ready for clients that begin; returns what to tell these.

        That is the ``hyperparameters`` of the optimizer, and whether it ``steps_at_once``, message
        by message.
        """
        return {"hyperparameters": self._mirror.all(), "steps_at_once": self._steps_at_once}

    def begin(self, call: Call | None) -> None:
        """Begin a step; ``call`` is None if the workers say only at its end what they want."""
        self._next = 0
        self._early = None
        if call is not None and call.clip is None and self._steps_at_once:
            self._mirror.take_over(call.hyperparameters)
            self._early = call

    def push(self, index: int) -> Iterable[int]:
        """Take in the mean gradient of a message from the accumulator.

        Returns:
            Numbers of the messages whose parameters are known now; never the last one.
        """
        if self._early is None:
            return ()
        spans = self._slots[index].message.spans
        complete = [p.param for p in spans if p.stop == self._params[p.param].numel()]
        if not complete:
            return ()
        self._set_gradients(complete, self._early)
        step_without_closure(self._optimizer)
        self._clear_gradients(complete)
        return self._up_to(min(index + 1, len(self._slots) - 1))

    def finish(self, call: Call) -> dict[str, Any]:
        """End the step, now that all gradients are there; returns what to tell the clients."""
        if self._early is None:
            self._mirror.take_over(call.hyperparameters)
            everything = range(len(self._params))
            self._set_gradients(everything, call)
            self._clip(call.clip)
            step_without_closure(self._optimizer)
            self._clear_gradients(everything)
        if self._after_step is not None:
            self._after_step()
        return {"hyperparameters": self._mirror.changes()}

    def remaining(self) -> Iterable[int]:
        """The messages that :meth:`push` has not returned, as their parameters become known."""
        return self._up_to(len(self._slots))

    def weights(self, index: int) -> Tensor:
        """The parameters of a message: packed now, or the parameter's own memory."""
        return self._slots[index].outgoing(self._params)

    def state(self) -> OptimizerState:
        """The state of the optimizer."""
        return OptimizerState.of(self._optimizer)

    def load_state(self, state: OptimizerState) -> None:
        """Give the optimizer a state to go on from."""
        state.put_into(self._optimizer)
        self._mirror = HyperparameterMirror(self._optimizer.param_groups)

    def parameters(self) -> Iterable[Tensor]:
        """The optimizer's parameters, one after another."""
        return (param.detach().cpu().contiguous() for param in self._params)

    @torch.no_grad()
    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Replace parameters, but keep what was only rounded for the wire."""
        sent = [param.detach().clone() for param in self._params]
        for slot in self._slots:  # their memory may hold gradients now
            Slot(slot.message, sent).round(sent)
        for param, was_sent, value in zip(self._params, sent, values, strict=True):
            given = value.to(param.device)
            param.copy_(torch.where(was_sent == given, param, given))

    def leave(self, farewell: dict[str, Any]) -> None:
        """Nobody else is to be told."""

    def fail(self, text: str) -> list[Sending]:
        """Nobody else is to be told."""
        return []

    def _up_to(self, stop: int) -> range:
        ready = range(self._next, stop)
        self._next = stop
        return ready

    def _set_gradients(self, indices: Iterable[int], call: Call) -> None:
        missing = set(call.missing)
        for index in indices:
            param, part = self._params[index], self._accumulator.parts[index]
            param.grad = None if index in missing else part.to(param.device, param.dtype)

    def _clear_gradients(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._params[index].grad = None

    def _clip(self, clip: Clip | None) -> None:
        if clip is None:
            return
        present = [param for param in self._params if param.grad is not None]
        if clip.by == "value":
            torch.nn.utils.clip_grad_value_(present, clip.limit)
        elif self._share_norms is None:
            torch.nn.utils.clip_grad_norm_(present, clip.limit)
        else:
            zero = torch.zeros(())
            norms = [
                zero if param.grad is None else torch.linalg.vector_norm(param.grad).cpu()
                for param in self._params
            ]
            total = torch.linalg.vector_norm(torch.stack(self._share_norms(norms)))
            torch.nn.utils.clip_grads_with_norm_(present, clip.limit, total)


class RemoteBackend(ServerClient):
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
        super().__init__(wire, params)
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
        answer = self.ask_for_weights(checksum)
        self._steps_at_once = answer["steps_at_once"]
        for memory in self._memory:
            self.wire.wait(self.wire.receive(memory, Lane.WEIGHTS), "the parameters")
        return answer

    def begin(self, call: Call | None) -> None:
        """Announce to the other rank that gradients follow."""
        self._next = self._known = 0
        self._is_streaming = call is None
        self._is_early = call is not None and call.clip is None and self._steps_at_once
        kind = Kind.STREAM if call is None else Kind.STEP
        self.wire.ask(Note(kind, {} if call is None else call.content()))

    def push(self, index: int) -> Iterable[int]:
        """Pass the mean gradient on; parameters are awaited some messages later."""
        message, memory = self._messages[index], self._memory[index]
        gradient = message.write(self._accumulator.slices[index], memory)
        self._sending.append(self.wire.send(gradient, Lane.GRADIENTS))
        self._receiving.append(self.wire.receive(memory, Lane.WEIGHTS))
        if any(span.stop == self.shapes[span.param].numel() for span in message.spans):
            self._known = index + 1  # the other rank steps whole parameters
        return self._arrivals(min(index - LAG + 1, self._known)) if self._is_early else ()

    def finish(self, call: Call) -> dict[str, Any]:
        """Say what the workers want, unless :meth:`begin` did, and wait for the step."""
        if self._is_streaming:
            self.wire.ask(Note(Kind.CALL, call.content()))
        return self.answer()

    def remaining(self) -> Iterable[int]:
        """Wait for the parameters that have not come yet; the gradients are there by then."""
        yield from self._arrivals(len(self._memory))
        self._sending, self._receiving = [], []

    def _arrivals(self, stop: int) -> Iterable[int]:
        for index in range(self._next, stop):
            self.wire.wait(self._receiving[index], "the parameters after a step")
            self._next = index + 1
            yield index

    def weights(self, index: int) -> Tensor:
        """The parameters of a message, as they came from the other rank."""
        return self._memory[index]

    def fail(self, text: str) -> list[Sending]:
        """Begin to tell the other rank, if it is there, why nothing more comes."""
        return self.wire.last_request(Note(Kind.FAIL, {"text": text}))


Backend = LocalBackend | RemoteBackend


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes gradients itself.

    Raises:
        ValueError: If its step needs a closure, as that of LBFGS does.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_it = closure is not None and closure.default is inspect.Parameter.empty
    if needs_it or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that computes gradients again and again, "
            "but the optimizer is on a rank that computes none. Use one that does not, such as "
            "AdamW or SGD."
        )


def step_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Make the step; one that turns out to need a closure is a TypeError that says so."""
    try:
        optimizer.step()
    except TypeError as error:
        name = type(optimizer).__name__
        raise TypeError(
            f"{name}.step() has failed without a closure: {error}. A closure computes gradients "
            f"again, which the rank of the optimizer cannot. If {name} needs one, use one that "
            "does not, such as AdamW or SGD."
        ) from error


def is_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a parameter depends on its own gradient and state alone.

    True for what is in ``torch.optim``, except LBFGS; unknown, so False, for all others.
    """
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not isinstance(optimizer, torch.optim.LBFGS)
