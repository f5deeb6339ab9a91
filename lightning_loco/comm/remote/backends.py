"""Where a server's mean gradients go: to an optimizer in this process, or on another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.remote.accumulator import Accumulator
from lightning_loco.comm.remote.calls import Call, Clip
from lightning_loco.comm.remote.plan import Message
from lightning_loco.comm.remote.settings import SettingsMirror, is_step_per_parameter
from lightning_loco.comm.remote.slots import Slot
from lightning_loco.comm.remote.state import State
from lightning_loco.comm.remote.wire import Kind, Lane, Note, Wire

LAG = 2


class Backend(Protocol):
    """Makes the steps of a server, message by message."""

    def join(self, checksum: int) -> dict[str, Any]:
        """Have the parameters ready.

        Returns:
            What to tell the clients: ``settings`` of the optimizer, and whether it
            ``steps_at_once``, message by message.
        """

    def begin(self, call: Call | None) -> None:
        """A step begins; None if what is wanted will be known at its end only."""

    def push(self, index: int) -> Iterable[int]:
        """The mean gradient of a message is in the accumulator.

        Returns:
            Messages whose parameters are known now; not yet the last one.
        """

    def finish(self, call: Call) -> dict[str, Any]:
        """All gradients are there; returns what to tell the clients about the step."""

    def remaining(self) -> Iterable[int]:
        """The messages that :meth:`push` has not returned, as their parameters become known."""

    def weights(self, index: int) -> Tensor:
        """The parameters of a message."""

    def state(self) -> State:
        """What the optimizer remembers."""

    def load_state(self, state: State) -> None:
        """Make the optimizer remember."""

    def parameters(self) -> Iterable[Tensor]:
        """All parameters in full precision."""

    def end(self, farewell: dict[str, Any]) -> None:
        """All clients have left."""


class LocalBackend:
    """An optimizer in this process.

    Where the step of a parameter depends on its own gradient alone and nothing has to be known
    about all gradients, parameters step as soon as their gradients are there.

    Args:
        optimizer: Of these parameters, and perhaps of others that stay without gradient.
        params: In the order of the workers.
        messages: How they are cut.
        accumulator: Where the gradients are. After the step the parameters leave from there.
        before_step: Called when the mean gradients are in place.
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
        before_step: Callable[[], object] | None = None,
        after_step: Callable[[], object] | None = None,
        share_norms: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._params = params
        self._slots = [
            Slot(message, params, accumulator.lend(index, message.dtype))
            for index, message in enumerate(messages)
        ]
        self._accumulator = accumulator
        self._before_step = before_step
        self._after_step = after_step
        self._share_norms = share_norms
        self._mirror = SettingsMirror(optimizer.param_groups)
        self._steps_at_once = is_step_per_parameter(optimizer) and before_step is None
        self._early: Call | None = None
        self._next = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """The optimizer's."""
        return {"settings": self._mirror.all(), "steps_at_once": self._steps_at_once}

    def begin(self, call: Call | None) -> None:
        """Take over the settings."""
        self._next = 0
        self._early = None
        if call is not None and call.clip is None and self._steps_at_once:
            self._mirror.take_over(call.settings)
            self._early = call

    def push(self, index: int) -> Iterable[int]:
        """Step the parameters that are complete, if nothing else has to be known."""
        if self._early is None:
            return ()
        pieces = self._slots[index].message.pieces
        complete = [p.param for p in pieces if p.stop == self._params[p.param].numel()]
        if not complete:
            return ()
        self._set_gradients(complete, self._early)
        self._optimizer.step()
        self._clear_gradients(complete)
        return self._up_to(min(index + 1, len(self._slots) - 1))

    def finish(self, call: Call) -> dict[str, Any]:
        """Step all parameters that have not been stepped yet."""
        if self._early is None:
            self._mirror.take_over(call.settings)
            everything = range(len(self._params))
            self._set_gradients(everything, call)
            self._clip(call.clip)
            if self._before_step is not None:
                self._before_step()
            self._optimizer.step()
            self._clear_gradients(everything)
        if self._after_step is not None:
            self._after_step()
        return {"settings": self._mirror.changes()}

    def remaining(self) -> Iterable[int]:
        """All that are left are known."""
        return self._up_to(len(self._slots))

    def weights(self, index: int) -> Tensor:
        """Packed now, or the parameter's own memory."""
        return self._slots[index].outgoing(self._params)

    def state(self) -> State:
        """The optimizer's."""
        return State.of(self._optimizer)

    def load_state(self, state: State) -> None:
        """Into the optimizer."""
        state.put_into(self._optimizer)
        self._mirror = SettingsMirror(self._optimizer.param_groups)

    def parameters(self) -> Iterable[Tensor]:
        """The optimizer's own."""
        return (param.detach().cpu().contiguous() for param in self._params)

    def end(self, farewell: dict[str, Any]) -> None:
        """Nothing to do."""

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


class RemoteBackend:
    """An optimizer on another rank, asked as a worker asks.

    Args:
        wire: To that rank.
        params: Their shapes.
        messages: As the workers cut them; this is how parameters come back.
        accumulator: Where the gradients are. A message's parameters come into the memory of its
            gradient, which is free by then: the answer to a message follows its arrival.
    """

    def __init__(
        self,
        wire: Wire,
        params: Sequence[Tensor],
        messages: Sequence[Message],
        accumulator: Accumulator,
    ) -> None:
        self._wire = wire
        self._params = params
        self._accumulator = accumulator
        self._memory = [
            accumulator.lend(index, message.dtype) for index, message in enumerate(messages)
        ]
        self._sending: list[dist.Work] = []
        self._receiving: list[dist.Work] = []
        self._steps_at_once = self._is_streaming = self._is_early = False
        self._next = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Ask for the parameters."""
        answer = ask_for_weights(self._wire, checksum)
        self._steps_at_once = answer["steps_at_once"]
        for memory in self._memory:
            self._wire.wait(self._wire.receive(memory, Lane.WEIGHTS), "the parameters")
        return answer

    def begin(self, call: Call | None) -> None:
        """Announce the gradients."""
        self._next = 0
        self._is_streaming = call is None
        self._is_early = call is not None and call.clip is None and self._steps_at_once
        kind = Kind.STREAM if call is None else Kind.STEP
        self._wire.ask(Note(kind, {} if call is None else call.content()))

    def push(self, index: int) -> Iterable[int]:
        """Pass the gradient on; parameters are awaited some messages later."""
        self._sending.append(self._wire.send(self._accumulator.slices[index], Lane.GRADIENTS))
        self._receiving.append(self._wire.receive(self._memory[index], Lane.WEIGHTS))
        return self._arrivals(index - LAG + 1) if self._is_early else ()

    def finish(self, call: Call) -> dict[str, Any]:
        """The other rank's answer."""
        if self._is_streaming:
            self._wire.ask(Note(Kind.CALL, call.content()))
        return check_answer(self._wire)

    def remaining(self) -> Iterable[int]:
        """Wait for the parameters that have not come yet."""
        yield from self._arrivals(len(self._memory))
        for work in self._sending:
            self._wire.wait(work, "the gradients")
        self._sending, self._receiving = [], []

    def _arrivals(self, stop: int) -> Iterable[int]:
        for index in range(self._next, stop):
            self._wire.wait(self._receiving[index], "the parameters after a step")
            self._next = index + 1
            yield index

    def weights(self, index: int) -> Tensor:
        """As they came."""
        return self._memory[index]

    def state(self) -> State:
        """Ask for it."""
        self._wire.ask(Note(Kind.STATE, {}))
        return State.receive(self._wire, check_answer(self._wire))

    def load_state(self, state: State) -> None:
        """Pass it on."""
        state.send(self._wire, lambda text: self._wire.ask(Note(Kind.LOAD_STATE, text)))
        check_answer(self._wire)

    def parameters(self) -> Iterable[Tensor]:
        """Ask for them."""
        return ask_for_parameters(self._wire, self._params)

    def end(self, farewell: dict[str, Any]) -> None:
        """Tell the other rank."""
        self._wire.ask(Note(Kind.LEAVE, farewell))


def ask_for_weights(wire: Wire, checksum: int) -> dict[str, Any]:
    """Ask for the parameters of the same model, which follow the answer.

    Raises:
        ValueError: If the other rank has another model.
        RuntimeError: If it is gone or too late.
    """
    wire.ask(Note(Kind.WEIGHTS, {"checksum": checksum}))
    answer = check_answer(wire)
    if "settings" not in answer:
        raise ValueError(
            f"{wire.name} has a model with other parameters. Build the same model on all ranks, "
            "and pass its parameters in the same order."
        )
    return answer


def ask_for_parameters(wire: Wire, params: Sequence[Tensor]) -> Iterable[Tensor]:
    """Ask for all parameters in full precision, one after another."""
    wire.ask(Note(Kind.PARAMETERS, {}))
    check_answer(wire)
    for param in params:
        memory = torch.empty(param.shape, dtype=param.dtype)
        wire.wait(wire.receive(memory.view(-1), Lane.STATE), "the parameters")
        yield memory


def check_answer(wire: Wire) -> dict[str, Any]:
    """Wait for an answer.

    Raises:
        RuntimeError: If the server tells of a failure; it need not listen to this rank any more.
    """
    answer = wire.answered()
    if "failure" in answer:
        with suppress(RuntimeError):
            wire.ask(Note(Kind.LEAVE, {}))
        raise RuntimeError(f"{wire.name}: {answer['failure']}")
    return answer
