"""Backends of a server, which take its steps: a local optimizer, or a client of another server.

Both receive the mean gradient bucket by bucket, and have the parameters after the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.parameter_server.buckets import Accumulator, BucketBuffer, ParamBucket
from lightning_loco.parameter_server.optimizer_state import HyperparameterSync, OptimizerState
from lightning_loco.parameter_server.protocol import (
    MessageKind,
    MessageTag,
    RankConnection,
    StepRequest,
)
from lightning_loco.parameter_server.server_client import ServerClient

LAG = 2
"""How many buckets are sent to another server before parameters of the first one are awaited."""


class LocalBackend:
    """Takes a server's steps with an optimizer in the same process.

    If the optimizer steps each parameter by its own gradient alone, and the step needs nothing that
    depends on all gradients, each parameter is stepped as soon as its gradient is complete.
    Parameters are in the order of the workers; others of the optimizer get no gradient. The memory
    of the mean gradient is reused to send parameters. ``after_step`` may step a schedule;
    ``exchange_norms`` exchanges the norms of the gradients with the other servers' optimizers, and
    returns all.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        buckets: Sequence[ParamBucket],
        accumulator: Accumulator,
        after_step: Callable[[], object] | None = None,
        exchange_norms: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self.shapes = params
        self._optimizer = optimizer
        self._params = params
        self._buffers = [
            BucketBuffer(bucket, params, accumulator.memory_for(index, bucket.dtype))
            for index, bucket in enumerate(buckets)
        ]
        self._accumulator = accumulator
        self._after_step = after_step
        self._exchange_norms = exchange_norms
        self._hyperparameters = HyperparameterSync(optimizer.param_groups)
        # Then parameters are sent while later gradients still arrive.
        self._steps_per_parameter = can_step_per_parameter(optimizer)
        self._early_request: StepRequest | None = None
        self._next = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Prepare the parameters for clients at their start; return the reply to them.

        The reply holds the optimizer's ``hyperparameters``, and as ``steps_at_once`` whether it can
        step parameters one by one.
        """
        return {
            "hyperparameters": self._hyperparameters.all(),
            "steps_at_once": self._steps_per_parameter,
        }

    def start_step(self, request: StepRequest | None) -> None:
        """Start a step; ``request`` is None if the workers send theirs after the gradients."""
        self._next = 0
        self._early_request = None
        # A norm is of all gradients, so clipping needs the last one before the first step.
        if request is not None and request.clip is None and self._steps_per_parameter:
            self._hyperparameters.update(request.hyperparameters)
            self._early_request = request

    def add_bucket(self, index: int) -> Iterable[int]:
        """Process the mean gradient of a bucket in the accumulator.

        Returns the buckets whose parameters are known now; never the last one.
        """
        if self._early_request is None:
            return ()
        slices = self._buffers[index].bucket.slices
        # A parameter may be in several buckets: it is stepped with the last of them.
        complete = [p.param for p in slices if p.stop == self._params[p.param].numel()]
        if not complete:
            return ()
        self._set_gradients(complete, self._early_request)
        step_without_closure(self._optimizer)
        self._clear_gradients(complete)
        return self._up_to(min(index + 1, len(self._buffers) - 1))

    def finish_step(self, request: StepRequest) -> dict[str, Any]:
        """Finish the step, after all buckets were added; return the reply to the clients."""
        if self._early_request is None:
            self._hyperparameters.update(request.hyperparameters)
            everything = range(len(self._params))
            self._set_gradients(everything, request)
            self._clip(request)
            step_without_closure(self._optimizer)
            self._clear_gradients(everything)
        if self._after_step is not None:
            self._after_step()
        return {"hyperparameters": self._hyperparameters.changes()}

    def remaining(self) -> Iterable[int]:
        """Yield the buckets that :meth:`add_bucket` has not returned."""
        return self._up_to(len(self._buffers))

    def weights(self, index: int) -> Tensor:
        """Return the parameters of a bucket, as they are sent."""
        return self._buffers[index].pack(self._params)

    def gradient_norms(self, missing: Iterable[int]) -> list[Tensor]:
        """Return the norm of each mean gradient in the accumulator, zero for a missing one."""
        left_out, zero = set(missing), torch.zeros((), dtype=torch.float32, device="cpu")
        return [
            zero
            if index in left_out
            else torch.linalg.vector_norm(gradient.to(param.device, param.dtype)).cpu()
            for index, (param, gradient) in enumerate(
                zip(self._params, self._accumulator.params, strict=True)
            )
        ]

    def state(self) -> OptimizerState:
        """Return the optimizer's state."""
        return OptimizerState.of(self._optimizer)

    def load_state(self, state: OptimizerState) -> None:
        """Load the optimizer's state."""
        state.load_into(self._optimizer)
        # Anew, because torch replaces the groups that it loads into.
        self._hyperparameters = HyperparameterSync(self._optimizer.param_groups)

    def parameters(self) -> Iterable[Tensor]:
        """Yield the optimizer's parameters in CPU memory, one after another."""
        return (param.detach().cpu().contiguous() for param in self._params)

    @torch.no_grad()
    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Replace parameters, except where they differ only because they were encoded."""
        sent = [param.detach().clone() for param in self._params]
        for buffer in self._buffers:  # their own memory may hold gradients now
            BucketBuffer(buffer.bucket, sent).round_trip(sent)
        for param, was_sent, value in zip(self._params, sent, values, strict=True):
            new = value.to(param.device)
            param.copy_(torch.where(was_sent == new, param, new))

    def leave(self, farewell: dict[str, Any]) -> None:
        """Do nothing: there is no other server."""

    def try_fail(self, text: str) -> list[dist.Work]:
        """Do nothing: there is no other server."""
        return []

    def _up_to(self, stop: int) -> range:
        ready = range(self._next, stop)
        self._next = stop
        return ready

    def _set_gradients(self, indices: Iterable[int], request: StepRequest) -> None:
        missing = set(request.missing)
        for index in indices:
            param, gradient = self._params[index], self._accumulator.params[index]
            param.grad = None if index in missing else gradient.to(param.device, param.dtype)

    def _clear_gradients(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._params[index].grad = None

    def _clip(self, request: StepRequest) -> None:
        if (clip := request.clip) is None:
            return
        present = [param for param in self._params if param.grad is not None]
        if clip.by == "value":
            torch.nn.utils.clip_grad_value_(present, clip.limit)
        elif self._exchange_norms is None:
            torch.nn.utils.clip_grad_norm_(present, clip.limit)
        else:
            norms = self.gradient_norms(request.missing)
            total = torch.linalg.vector_norm(torch.stack(self._exchange_norms(norms)))
            torch.nn.utils.clip_grads_with_norm_(present, clip.limit, total)


class RemoteBackend(ServerClient):
    """Lets another rank take a server's steps, as a client of it.

    ``shapes`` have the parameters' shapes and dtypes. The accumulator holds the mean gradient. A
    bucket's parameters are received into the memory from which its gradient is sent: they are sent
    only after the gradient has arrived.
    """

    def __init__(
        self,
        connection: RankConnection,
        params: Sequence[Tensor],
        buckets: Sequence[ParamBucket],
        accumulator: Accumulator,
    ) -> None:
        super().__init__(connection, params)
        self._accumulator = accumulator
        self._buckets = buckets
        self._memory = [
            accumulator.memory_for(index, bucket.dtype)
            if bucket.codec is None
            else torch.empty(bucket.num_bytes, dtype=torch.uint8, device="cpu")
            for index, bucket in enumerate(buckets)
        ]
        self._sends: list[dist.Work] = []
        self._receives: list[dist.Work] = []
        self._steps_per_parameter = self._is_streaming = self._is_early = False
        self._next = self._known = 0

    def join(self, checksum: int) -> dict[str, Any]:
        """Request the parameters and wait for them; return the reply for this server's clients."""
        reply = self.ask_for_weights(checksum)
        self._steps_per_parameter = reply["steps_at_once"]
        for memory in self._memory:
            work = self.connection.receive(memory, MessageTag.WEIGHTS)
            self.connection.wait(work, "the parameters")
        return reply

    def start_step(self, request: StepRequest | None) -> None:
        """Announce gradients; ``request`` is None if the workers send theirs after them."""
        self._next = self._known = 0
        self._is_streaming = request is None
        self._is_early = request is not None and request.clip is None and self._steps_per_parameter
        content = {} if request is None else {"request": request.to_dict()}
        self.request(MessageKind.STEP, content)

    def add_bucket(self, index: int) -> Iterable[int]:
        """Send the mean gradient of a bucket.

        Returns the buckets whose parameters were received meanwhile, :data:`LAG` buckets later.
        """
        bucket, memory = self._buckets[index], self._memory[index]
        gradient = bucket.encode(self._accumulator.buckets[index], memory)
        self._sends.append(self.connection.send(gradient, MessageTag.GRADIENTS))
        self._receives.append(self.connection.receive(memory, MessageTag.WEIGHTS))
        # Without a parameter that ends in it, its values are known with those of a later bucket.
        if any(part.stop == self.shapes[part.param].numel() for part in bucket.slices):
            self._known = index + 1  # the other rank steps whole parameters
        return self._receive_up_to(min(index - LAG + 1, self._known)) if self._is_early else ()

    def finish_step(self, request: StepRequest) -> dict[str, Any]:
        """Send the request, unless :meth:`start_step` has, and wait for the step."""
        if self._is_streaming:
            self.request(MessageKind.STEP_REQUEST, {"request": request.to_dict()})
        return self.wait_for_reply()

    def remaining(self) -> Iterable[int]:
        """Wait for the parameters that were not received yet; yield their buckets."""
        yield from self._receive_up_to(len(self._memory))
        self._sends, self._receives = [], []

    def _receive_up_to(self, stop: int) -> Iterable[int]:
        for index in range(self._next, stop):
            self.connection.wait(self._receives[index], "the parameters after a step")
            self._next = index + 1
            yield index

    def weights(self, index: int) -> Tensor:
        """Return the parameters of a bucket, as they were received."""
        return self._memory[index]

    def try_fail(self, text: str) -> list[dist.Work]:
        """Start to send the other rank the reason of a failure, if it is reachable."""
        return self.connection.try_send(MessageKind.LEAVE, {"failure": text})


Backend = LocalBackend | RemoteBackend


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose step needs a closure, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that computes gradients several times per "
            "step, but the optimizer is on a rank that computes none. Use one that does not, such "
            "as AdamW or SGD."
        )


def step_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Take the step; TypeError if it turns out to need a closure."""
    try:
        optimizer.step()
    except TypeError as error:
        name = type(optimizer).__name__
        raise TypeError(
            f"{name}.step() has failed without a closure: {error}. A closure computes gradients "
            f"again, which is not possible on the optimizer's rank. If {name} needs one, use one "
            "that does not, such as AdamW or SGD."
        ) from error


def can_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a parameter's step depends only on the gradient and state of that parameter.

    True for the optimizers of ``torch.optim`` except LBFGS; False for all others, as it is unknown.
    """
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    return is_of_torch and not isinstance(optimizer, torch.optim.LBFGS)
