"""The optimizer as a worker sees it: gradients leave, parameters come back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.fault_points import reach
from lightning_loco.parameter_server.buckets import (
    model_checksum,
    share_parameters,
    trainable_parameters,
)
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import Transport
from lightning_loco.parameter_server.server_client import Channel
from lightning_loco.parameter_server.step_request import Call, Clip
from lightning_loco.parameter_server.tiers import ReplicaGroup


class RemoteOptimizer(torch.optim.Optimizer):
    """Sends the gradients to the aggregator and takes over the parameters after its step.

    The step is made on another rank by any optimizer of ``torch.optim``, with the mean of all
    workers' gradients. A parameter without a gradient counts as zero where another worker has one,
    and is left out of the step where none has.

    Learning rates and the other numbers of ``param_groups`` are those of the optimizer there: what
    a schedule changes on either side, the other side learns with the next step. So it is with
    parameters that all workers change by hand, by clipping for instance; a step after changes that
    differ raises. Schedulers can be made for a ``RemoteOptimizer`` once :meth:`receive_weights` has
    been called. ``state_dict`` and ``load_state_dict`` ask for and set the state of the optimizer
    there, in its own format.

    Args:
        params: The model's parameters or parameter groups, in the same order on all ranks. Those
            that do not require gradients now are left alone.
        aggregator_rank: The rank that takes in gradients, as :func:`serve` does there; several when
            they share the parameters.
        transport: How the ranks are connected.
        replica_group: The ranks that are one worker together, with gloo. Their gradients must have
            been reduced, as ``DistributedDataParallel`` does; the first one talks to the aggregator
            and shares the parameters.

    Attributes:
        stop_agreed: Why all workers stop now; see :meth:`request_stop`.
        wait_s: Seconds spent in steps, without closures.
        present: Ranks of the workers that are left, as of the last sync point; see
        :meth:`sync_point`. has_left: Whether this worker has said its last word to the servers.
        optimizer: What monitors show instead; see :meth:`stand_for`.

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
        self._are_groups_final = True
        ranks = [aggregator_rank] if isinstance(aggregator_rank, int) else list(aggregator_rank)
        self._replica = ReplicaGroup(replica_group)
        self._connect(ranks, transport or Transport())
        self._is_expecting = False
        self._handles = self._watch_gradients() if self._replica.leads else []
        self._clip: Clip | None = None
        self._stop_reason: str | None = None
        self.wait_s = 0.0
        self.stop_agreed: str | None = None
        self.present: list[int] | None = None
        self.has_left = False
        self.optimizer: torch.optim.Optimizer | None = None

    def _connect(self, ranks: Sequence[int], transport: Transport) -> None:
        """Make a channel to each server, for its share of the parameters."""
        run = transport.next_run()  # first: all ranks count as often, whatever error comes
        trainable, self._frozen = trainable_parameters(self.param_groups)
        params = [param for _, param in trainable]
        self._channels: list[Channel] = []
        self._shares: list[list[tuple[int, Tensor]]] = []
        for share, rank in zip(share_parameters(params, len(ranks)), ranks, strict=True):
            shared = [params[index] for index in share]
            messages = transport.plan(shared)
            wire = transport.wire(rank, f"the aggregator (rank {rank})", run)
            checksum = model_checksum(shared, messages)
            self._channels.append(Channel(shared, self.param_groups, messages, wire, checksum))
            self._shares.append([trainable[index] for index in share])
        for channel in self._channels:
            others = [other.wire for other in self._channels if other is not channel]
            channel.wire.waiting_too = others

    def _watch_gradients(self) -> list[Any]:
        """Notice when a parameter gets its gradient."""
        return [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._on_gradient, channel, place)
            )
            for channel, share in zip(self._channels, self._shares, strict=True)
            for place, (_, param) in enumerate(share)
        ]

    def _on_gradient(self, channel: Channel, place: int, _: Tensor) -> None:
        if self._is_expecting:
            channel.has_gradient(place)

    def __getattr__(self, name: str) -> Any:
        """Say why what the optimizer on the other rank can do cannot be asked for here."""
        there = self.__dict__.get("optimizer")
        if not name.startswith("_") and hasattr(there, name):
            raise AttributeError(
                f"{name!r} of {type(there).__name__} cannot be used here: the optimizer is on "
                "another rank, which is sent gradients and makes steps, and nothing else. Use an "
                "optimizer without such methods, or a strategy whose workers step by themselves."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only as part of the constructor: the optimizer on the other rank gets no more groups.

        Raises:
            RuntimeError: At any later time.
        """
        if getattr(self, "_are_groups_final", False):
            raise RuntimeError(
                "A parameter group was added to the optimizer after the start, but only the "
                "parameters that it has then are exchanged. Give it all of them in "
                "configure_optimizers, or call fit again."
            )
        super().add_param_group(param_group)

    def stand_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Let monitors of learning rates and the like see another optimizer of the same groups."""
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    def receive_weights(self) -> None:
        """Take over the parameters and hyper-parameters of the ranks that have the optimizer.

        Raises:
            ValueError: If one has another model.
            RuntimeError: If one is gone or too late.
        """
        for channel in self._channels if self._replica.leads else ():
            channel.join()
        self._take_over()

    def expect_backward(self) -> None:
        """Send gradients while the next backward pass computes them.

        Call it before the last backward pass of a step. The gradients must not be touched between
        it and :meth:`step`.
        """
        if self._replica.leads:
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
        reach("local step")
        _check_exchanged(self.param_groups, self._frozen)
        started = time.perf_counter()
        call = Call(clip=self._clip, stop=self._stop_reason)
        self._clip = None
        if self._replica.leads:
            self._make_step(call)
        self._take_over()
        self.stop_agreed = self._replica.share_text(self.stop_agreed)
        self.wait_s += time.perf_counter() - started
        return loss

    def _make_step(self, call: Call) -> None:
        """Have the step made; :meth:`_take_over` ends it."""
        self._is_expecting = False
        for channel in self._channels:
            reach("asking for a step")
            channel.ask_for_step(call)
        reach("after sending")
        for channel in self._channels:
            channel.tell_changes()
        for stop in [channel.finish_step() for channel in self._channels]:
            self.stop_agreed = stop or self.stop_agreed

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after a common step; safe to call from a signal handler.

        ``stop_agreed`` is the reason, on all of them, once that step is made.
        """
        self._stop_reason = reason

    @torch.no_grad()
    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have come to the same place; others' steps go on meanwhile.

        ``present`` are then the ranks of the workers that are left, and all of them have the
        parameters after the last step.

        Args:
            purpose: The place in words, equal on all workers.

        Raises:
            RuntimeError: If others have come to another place, or are gone or too late.
        """
        behind = False
        if self._replica.leads:
            for channel in self._channels:
                channel.ask_for_sync_point(purpose, self._stop_reason)
            for answer in [channel.sync_point() for channel in self._channels]:
                self.stop_agreed = answer["stop"] or self.stop_agreed
                present = answer["present"]
                self.present = [rank for rank in self.present or present if rank in present]
                behind = behind or answer["behind"]
        if self._replica.share_text("behind" if behind else None) is not None:
            for channel in self._channels:
                channel.catch_up(self._replica.share, self._replica.leads)

    def are_finite(self, here: bool) -> bool:
        """Whether the gradients of all workers are finite: for gradient scalers.

        Args:
            here: Whether this worker's are.
        """
        finite = here
        if self._replica.leads:
            finite = all([channel.are_finite(here) for channel in self._channels])
        return self._replica.share_text("finite" if finite else None) is not None

    @property
    def is_changed(self) -> bool:
        """Whether parameters were changed by hand since they came; the next step tells them."""
        return any(channel.is_changed for channel in self._channels)

    def parameters_in_full(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its value on the server, which has not been rounded for the wire."""
        return [
            (param, value)
            for channel, share in zip(self._channels, self._shares, strict=True)
            for (_, param), value in zip(share, channel.parameters(), strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer on the other rank, as its own ``state_dict`` gives it.

        One worker may ask, between two steps.
        """
        content = super().state_dict()
        if self._replica.leads:
            state = OptimizerState.join([channel.state() for channel in self._channels])
            content["state"] = state.values
            for group, there in zip(content["param_groups"], state.groups, strict=True):
                group.update({name: v for name, v in there.items() if name not in group})
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer on the other rank a state, and take over its hyper-parameters.

        One worker may do it, or all with the same state, between two steps.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
        ]
        if self._replica.leads:
            state = OptimizerState(state_dict["state"], groups)
            for channel, share in zip(self._channels, self._shares, strict=True):
                channel.load_state(state.share([number for number, _ in share]))
        for present, group in zip(self.param_groups, groups, strict=True):
            present.update(group)

    def leave(self, farewell: dict[str, Any] | None = None) -> None:
        """Say that this worker makes no more steps; a second call does nothing.

        Args:
            farewell: What the servers should know at the end; see :func:`serve`.
        """
        if self._has_last_word():
            for channel in self._channels:
                channel.leave(farewell or {})
            self._let_go_of_servers()

    def fail(self, error: BaseException) -> None:
        """Leave because of an error, which the other ranks then name."""
        if self._has_last_word():
            for channel in self._channels:
                with suppress(RuntimeError):
                    channel.fail(f"{type(error).__name__}: {error}")
            self._let_go_of_servers()

    def _has_last_word(self) -> bool:
        """Whether to say it; not the second time."""
        has_left, self.has_left = self.has_left, True
        self.forget_parameters()
        return self._replica.leads and not has_left

    def forget_parameters(self) -> None:
        """Remove the hooks from the parameters; no more steps can be made."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for channel in self._channels:
            channel.end()

    def let_go(self) -> None:
        """Keep nothing of the connections, without a last word; twice does no harm."""
        self.forget_parameters()
        self._let_go_of_servers()
        self._replica.let_go()

    def _let_go_of_servers(self) -> None:
        for channel in self._channels:
            channel.let_go()

    @property
    def bytes_sent(self) -> int:
        """All bytes that have left this rank for the servers."""
        return sum(channel.wire.bytes_sent for channel in self._channels)

    @property
    def bytes_saved(self) -> int:
        """By how much more that would have been without compression."""
        return sum(channel.bytes_saved for channel in self._channels)

    @property
    def bytes_received(self) -> int:
        """All bytes that have come from the servers."""
        return sum(channel.wire.bytes_received for channel in self._channels)

    @torch.no_grad()
    def _take_over(self) -> None:
        reach("outer step")
        for channel in self._channels:
            take_over = channel.take_over if self._replica.leads else channel.follow
            take_over(self._replica.share)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return float(value)


def _check_exchanged(groups: Sequence[dict[str, Any]], frozen: Iterable[Tensor]) -> None:
    """Refuse gradients that cannot be sent, and parameters that the servers do not expect."""
    for group in groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(
                    "A parameter has a sparse gradient, which cannot be sent. Use "
                    "Embedding(sparse=False)."
                )
    if any(param.requires_grad for param in frozen):
        raise RuntimeError(
            "A parameter became trainable after the start, but only parameters that require "
            "gradients then are exchanged. Unfreeze before fit, or call fit again after "
            "unfreezing."
        )
