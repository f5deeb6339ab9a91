"""The optimizer as a worker sees it: gradients leave, parameters come back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.checks import schema_checksum
from lightning_loco.comm.remote.calls import Call, Clip
from lightning_loco.comm.remote.channel import Channel
from lightning_loco.comm.remote.plan import Message, plan_messages, share_parameters
from lightning_loco.comm.remote.state import State
from lightning_loco.comm.remote.transport import Transport


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
        """Take over the parameters and settings of the ranks that have the optimizer.

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
        self.exchange(None)
        return loss

    @torch.no_grad()
    def exchange(self, stop: str | None) -> str | None:
        """What :meth:`step` does when the gradients are there.

        Args:
            stop: Why all workers should stop after this step, if this one was asked to.

        Returns:
            Why to stop, if any worker was asked to.
        """
        self._check_frozen()
        call = Call(clip=self._clip, stop=stop)
        self._clip, self._is_expecting = None, False
        agreed = None
        if self._leads:
            for channel in self._channels:
                channel.ask_for_step(call)
            for channel in self._channels:
                agreed = channel.finish_step() or agreed
        self._take_over()
        return agreed

    def meet(self, purpose: str, stop: str | None = None) -> str | None:
        """Wait until all workers have come to the same place; others' steps go on meanwhile.

        Args:
            purpose: The place in words, equal on all workers.
            stop: As in :meth:`exchange`.

        Returns:
            Why to stop, if any worker was asked to.
        """
        answers = [c.meet(purpose, stop) for c in self._channels] if self._leads else []
        return next((answer["stop"] for answer in answers if answer["stop"]), None)

    def are_finite(self, here: bool) -> bool:
        """Whether the gradients of all workers are finite: for gradient scalers.

        Args:
            here: Whether this worker's are.
        """
        return all([channel.are_finite(here) for channel in self._channels])

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
            state = State.join([channel.state() for channel in self._channels])
            content["state"] = state.values
            for group, settings in zip(content["param_groups"], state.groups, strict=True):
                group.update(settings)
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer on the other rank a state, and take over its settings.

        One worker may do it, or all with the same state, between two steps.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
        ]
        state = State(state_dict["state"], groups)
        for channel, share in zip(self._channels, self._shares, strict=True):
            channel.load_state(state.share([self._numbers[index] for index in share]))
        for present, group in zip(self.param_groups, groups, strict=True):
            present.update(group)

    def leave(self, farewell: dict[str, Any] | None = None) -> None:
        """Say that this worker makes no more steps; a second call does nothing.

        Args:
            farewell: What the servers should know at the end; see :class:`Server`.
        """
        if self._left:
            return
        self._left = True
        self.forget_parameters()
        if self._leads:
            for channel in self._channels:
                channel.leave(farewell or {})

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

    def _check_frozen(self) -> None:
        if any(param.requires_grad for param in self._frozen):
            raise RuntimeError(
                "A parameter became trainable after the start, but only parameters that require "
                "gradients then are exchanged. Unfreeze before fit, or call fit again after "
                "unfreezing."
            )


def trainable_parameters(
    groups: Iterable[dict[str, Any]],
) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
    """Parameters that require gradients, with their number in ``state_dict``, and the others."""
    params = [param for group in groups for param in group["params"]]
    trainable = [(number, param) for number, param in enumerate(params) if param.requires_grad]
    return trainable, [param for param in params if not param.requires_grad]


def model_checksum(params: Iterable[Tensor], messages: Sequence[Message]) -> int:
    """63 bits that tell other models, and the same ones cut differently, apart."""
    shapes = [(tuple(param.shape), str(param.dtype)) for param in params]
    cuts = [(message.pieces, str(message.dtype)) for message in messages]
    return schema_checksum([shapes, cuts]) >> 1


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return float(value)
