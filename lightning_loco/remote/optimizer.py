"""The optimizer as a worker sees it: gradients leave, parameters come back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.calls import Call, Clip
from lightning_loco.remote.channel import Channel
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.plan import (
    model_checksum,
    plan_messages,
    share_parameters,
    trainable_parameters,
)
from lightning_loco.remote.transport import Transport


class RemoteOptimizer(torch.optim.Optimizer):
    """Sends the gradients to the aggregator and takes over the parameters after its step.

    The step is made on another rank by any optimizer of ``torch.optim``, with the mean of all
    workers' gradients. A parameter without a gradient counts as zero where another worker has one,
    and is left out of the step where none has.

    Learning rates and the other numbers of ``param_groups`` are those of the optimizer there: what
    a schedule changes on either side, the other side learns with the next step. Schedulers can be
    made for a ``RemoteOptimizer`` once :meth:`receive_weights` has been called. ``state_dict`` and
    ``load_state_dict`` ask for and set the state of the optimizer there, in its own format.

    Args:
        params: The model's parameters or parameter groups, in the same order on all ranks. Those
            that do not require gradients now are left alone.
        aggregator_rank: The rank that runs :func:`aggregator` or
            :func:`aggregator_optimizer`; several when they share the parameters.
        transport: How the ranks are connected.
        replica_group: The ranks that are one worker together, with gloo. Their gradients must have
            been reduced, as ``DistributedDataParallel`` does; the first one talks to the aggregator
            and shares the parameters.

    Attributes:
        stop_agreed: Why all workers stop now; see :meth:`request_stop`.
        wait_s: Seconds spent in steps, without closures.
        present: Ranks of the workers that are left, as of the last meeting; see :meth:`meet`.

    Source:
        The hierarchical training example of tt-train.

    Example::

        remote = RemoteOptimizer(model.parameters(), aggregator_rank=num_workers)
        remote.receive_weights()
        for batch in data:
            remote.zero_grad()
            loss(model, batch).backward()
            remote.step()
        remote.leave()
    """

    def __init__(
        self,
        params: Any,
        aggregator_rank: int | Sequence[int],
        *,
        transport: Transport | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {})
        ranks = [aggregator_rank] if isinstance(aggregator_rank, int) else list(aggregator_rank)
        self._replica_group = replica_group
        self._leads = replica_group is None or dist.get_rank(replica_group) == 0
        trainable, self._frozen = trainable_parameters(self.param_groups)
        self._numbers = [number for number, _ in trainable]
        self._shares = share_parameters([param for _, param in trainable], len(ranks))
        transport = transport or Transport()
        self._channels = []
        for share, rank in zip(self._shares, ranks, strict=True):
            shared = [trainable[index][1] for index in share]
            messages = plan_messages(shared, transport.bucket_bytes, transport.wire_dtype)
            checksum = model_checksum(shared, messages)
            wire = transport.wire(rank, f"the aggregator (rank {rank})")
            self._channels.append(Channel(shared, self.param_groups, messages, wire, checksum))
        self._is_expecting = False
        self._clip: Clip | None = None
        self._stop_reason: str | None = None
        self.wait_s = 0.0
        self.stop_agreed: str | None = None
        self.present: list[int] | None = None
        self._left = False
        self._handles = [
            trainable[index][1].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._on_gradient, channel, place)
            )
            for channel, share in zip(self._channels, self._shares, strict=True)
            for place, index in enumerate(share)
            if self._leads
        ]

    def receive_weights(self) -> None:
        """Take over the parameters and hyper-parameters of the ranks that have the optimizer.

        Raises:
            ValueError: If one has another model.
            RuntimeError: If one is gone or too late.
        """
        if self._leads:
            for channel in self._channels:
                channel.join()
        self._take_over()

    def expect_backward(self) -> None:
        """Send gradients while the next backward pass computes them.

        Call it before the last backward pass of a step. The gradients must not be touched between
        it and :meth:`step`.
        """
        if self._leads:
            self._is_expecting = True
            for channel in self._channels:
                channel.expect_gradients()

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Have the mean gradient clipped in the next step, by the norm of all parameters.

        Raises:
            ValueError: If ``max_norm`` is not positive.
        """
        self._clip = Clip("norm", _positive("max_norm", max_norm))

    def clip_grad_value_(self, clip_value: float) -> None:
        """Have the mean gradient clipped in the next step, element by element.

        Raises:
            ValueError: If ``clip_value`` is not positive.
        """
        self._clip = Clip("value", _positive("clip_value", clip_value))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the step made; returns with the new parameters in place.

        Args:
            closure: Computes the gradients, if given.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If the aggregator is gone or too late.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        started = time.perf_counter()
        call = Call(clip=self._clip, stop=self._stop_reason)
        self._clip, self._is_expecting = None, False
        if self._leads:
            for channel in self._channels:
                channel.ask_for_step(call)
            for channel in self._channels:
                self.stop_agreed = channel.finish_step() or self.stop_agreed
        self._take_over()
        self.stop_agreed = self._share_text(self.stop_agreed)
        self.wait_s += time.perf_counter() - started
        return loss

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after a common step; safe to call from a signal handler.

        ``stop_agreed`` is the reason, on all of them, once that step is made.
        """
        self._stop_reason = reason

    def meet(self, purpose: str) -> None:
        """Wait until all workers have come to the same place; others' steps go on meanwhile.

        ``present`` are then the ranks of the workers that are left.

        Args:
            purpose: The place in words, equal on all workers.

        Raises:
            RuntimeError: If others have come to another place, or are gone or too late.
        """
        if not self._leads:
            return
        answers = [channel.meet(purpose, self._stop_reason) for channel in self._channels]
        for answer in answers:
            self.stop_agreed = answer["stop"] or self.stop_agreed
            ranks = answer["present"]
            self.present = [rank for rank in self.present or ranks if rank in ranks]

    def are_finite(self, here: bool) -> bool:
        """Whether the gradients of all workers are finite: for gradient scalers.

        Args:
            here: Whether this worker's are.
        """
        finite = here
        if self._leads:
            finite = all([channel.are_finite(here) for channel in self._channels])
        return self._share_text("finite" if finite else None) is not None

    def parameters_in_full(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its value on the server, which has not been rounded for the wire."""
        pairs = []
        params = [param for group in self.param_groups for param in group["params"]]
        for channel, share in zip(self._channels, self._shares, strict=True):
            values = channel.parameters()
            pairs += [(params[self._numbers[i]], v) for i, v in zip(share, values, strict=True)]
        return pairs

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer on the other rank, as its own ``state_dict`` gives it.

        One worker may ask, between two steps.
        """
        content = super().state_dict()
        if self._leads:
            state = OptimizerState.join([channel.state() for channel in self._channels])
            content["state"] = state.values
            for group, settings in zip(content["param_groups"], state.groups, strict=True):
                group.update({name: v for name, v in settings.items() if name not in group})
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer on the other rank a state, and take over its settings.

        One worker may do it, or all with the same state, between two steps.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
        ]
        state = OptimizerState(state_dict["state"], groups)
        for channel, share in zip(self._channels, self._shares, strict=True):
            if self._leads:
                channel.load_state(state.share([self._numbers[index] for index in share]))
        for present, group in zip(self.param_groups, groups, strict=True):
            present.update(group)

    def leave(self, farewell: dict[str, Any] | None = None) -> None:
        """Say that this worker makes no more steps; a second call does nothing.

        Args:
            farewell: What the servers should know at the end; see :class:`Server`.
        """
        for channel in self._part():
            channel.leave(farewell or {})

    def fail(self, error: BaseException) -> None:
        """Leave because of an error, which the other ranks then name."""
        for channel in self._part():
            with suppress(RuntimeError):
                channel.fail(f"{type(error).__name__}: {error}")

    @property
    def has_left(self) -> bool:
        """Whether this worker has said its last word to the servers."""
        return self._left

    def _part(self) -> list[Channel]:
        """Those to say a last word to; none the second time."""
        if self._left:
            return []
        self._left = True
        self.forget_parameters()
        return self._channels if self._leads else []

    def forget_parameters(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def bytes_sent(self) -> int:
        """All bytes that have left this rank for the servers."""
        return sum(channel.wire.bytes_sent for channel in self._channels)

    @property
    def bytes_received(self) -> int:
        """All bytes that have come from the servers."""
        return sum(channel.wire.bytes_received for channel in self._channels)

    def _on_gradient(self, channel: Channel, place: int, _: Tensor) -> None:
        if self._is_expecting:
            channel.has_gradient(place)

    @torch.no_grad()
    def _take_over(self) -> None:
        for channel in self._channels:
            if self._leads:
                channel.take_over(self._share)
            else:
                channel.follow(self._share)

    def _share(self, tensor: Tensor) -> None:
        if self._replica_group is not None:
            source = dist.get_global_rank(self._replica_group, 0)
            dist.broadcast(tensor, source, group=self._replica_group)

    def _share_text(self, text: str | None) -> str | None:
        """What the rank that talks to the servers has heard, on all ranks of this worker."""
        if self._replica_group is None:
            return text
        letters = torch.zeros(32, dtype=torch.uint8)
        for place, letter in enumerate((text or "").encode()[:32]):
            letters[place] = letter
        self._share(letters)
        return bytes(letters.tolist()).rstrip(b"\0").decode() or None

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    raise ValueError(
                        "A parameter has a sparse gradient, which cannot be sent. Use "
                        "Embedding(sparse=False)."
                    )
        if any(param.requires_grad for param in self._frozen):
            raise RuntimeError(
                "A parameter became trainable after the start, but only parameters that require "
                "gradients then are exchanged. Unfreeze before fit, or call fit again after "
                "unfreezing."
            )


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return float(value)
