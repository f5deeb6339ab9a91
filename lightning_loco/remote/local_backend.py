"""Steps of an optimizer in the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.calls import Call, Clip
from lightning_loco.remote.hyperparameters import HyperparameterMirror
from lightning_loco.remote.message import Message
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.slots import Slot
from lightning_loco.remote.supported_optimizers import (
    is_step_per_parameter,
    step_without_closure,
)
from lightning_loco.remote.wire import Sending


class LocalBackend:
    """Makes a server's steps with an optimizer in the same process.

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
        self.shapes = params
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
        self._mirror = HyperparameterMirror(optimizer.param_groups)
        self._steps_at_once = is_step_per_parameter(optimizer) and before_step is None
        self._early: Call | None = None
        self._next = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Tell the optimizer's hyper-parameters; its parameters are always ready."""
        return {"hyperparameters": self._mirror.all(), "steps_at_once": self._steps_at_once}

    def begin(self, call: Call | None) -> None:
        """Take over the workers' hyper-parameters, if this step can begin before its end."""
        self._next = 0
        self._early = None
        if call is not None and call.clip is None and self._steps_at_once:
            self._mirror.take_over(call.hyperparameters)
            self._early = call

    def push(self, index: int) -> Iterable[int]:
        """Step the parameters that are complete, if nothing else has to be known."""
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
        """Step all parameters that have not been stepped yet."""
        if self._early is None:
            self._mirror.take_over(call.hyperparameters)
            everything = range(len(self._params))
            self._set_gradients(everything, call)
            self._clip(call.clip)
            if self._before_step is not None:
                self._before_step()
            step_without_closure(self._optimizer)
            self._clear_gradients(everything)
        if self._after_step is not None:
            self._after_step()
        return {"hyperparameters": self._mirror.changes()}

    def remaining(self) -> Iterable[int]:
        """The messages that have not left yet: after the step all parameters are known."""
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

    def end(self, farewell: dict[str, Any]) -> None:
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
