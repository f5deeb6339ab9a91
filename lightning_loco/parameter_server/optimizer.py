"""The optimizer on the workers: it sends gradients to servers and receives parameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.parameter_server.buckets import (
    model_checksum,
    shard_parameters,
    trainable_parameters,
)
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import ClippingSettings, StepRequest, Transport
from lightning_loco.parameter_server.server_client import ShardClient

_TEXT_BYTES = 32


class RemoteOptimizer(torch.optim.Optimizer):
    """Sends the gradients to the aggregator and receives the parameters after its step.

    An optimizer of ``torch.optim`` on another rank takes the step, with the mean of all workers'
    gradients. A parameter without a gradient counts as zero where another worker has one,
    and is left out of the step if no worker has one.

    Learning rates and the other numbers of ``param_groups`` equal those on that rank: changes on
    either side are sent to the other side with the next step. So are parameters that all workers
    change in the same way outside the optimizer, by clipping for instance; if the changes differ,
    the next step raises an error. Make schedulers for a ``RemoteOptimizer`` after
    :meth:`receive_weights`. ``state_dict`` and ``load_state_dict`` read and write the state of the
    optimizer there, in its own format.

    Args:
        params: The model's parameters or parameter groups, in the same order on all ranks. Those
            that do not require gradients now are ignored.
        aggregator_rank: The rank that receives gradients, as :func:`serve` does there; several
            ranks if the parameters are sharded.
        transport: How the ranks are connected.
        replica_group: The ranks of this worker, with gloo. Their gradients must be averaged before
            a step, as ``DistributedDataParallel`` does; the first rank is the client of the
            aggregator and broadcasts the parameters.

    Attributes:
        stop_agreed: Why all workers stop now; see :meth:`request_stop`.
        wait_s: Seconds spent in steps, without closures.
        has_left: Whether this worker has left the servers.
        optimizer: A local optimizer for monitors; see :meth:`set_local_optimizer`.

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
        self._replica = ClientRanks(replica_group)
        self._connect(ranks, transport or Transport())
        self._is_streaming = False
        self._handles = self._register_hooks() if self._replica.is_leader else []
        self._clip: ClippingSettings | None = None
        self._stop_reason: str | None = None
        self.wait_s = 0.0
        self.stop_agreed: str | None = None
        self.has_left = False
        self.optimizer: torch.optim.Optimizer | None = None

    def _connect(self, ranks: Sequence[int], transport: Transport) -> None:
        """Make a client of each server, for its shard of the parameters."""
        run = transport.next_run()  # before any error, so that all ranks have the same count
        trainable, self._frozen = trainable_parameters(self.param_groups)
        params = [param for _, param in trainable]
        self._clients: list[ShardClient] = []
        self._shards: list[list[tuple[int, Tensor]]] = []
        for indices, rank in zip(shard_parameters(params, len(ranks)), ranks, strict=True):
            shard = [params[index] for index in indices]
            buckets = transport.plan_buckets(shard)
            connection = transport.connect(rank, f"the aggregator (rank {rank})", run)
            checksum = model_checksum(shard, buckets)
            client = ShardClient(shard, self.param_groups, buckets, connection, checksum)
            self._clients.append(client)
            self._shards.append([trainable[index] for index in indices])
        # While one server waits for a late worker, the others must not take this one for lost.
        for client in self._clients:
            others = [other.connection for other in self._clients if other is not client]
            client.connection.other_servers = others

    def _register_hooks(self) -> list[Any]:
        """Have :meth:`_on_gradient` called when a parameter's gradient is ready."""
        return [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._on_gradient, client, index)
            )
            for client, shard in zip(self._clients, self._shards, strict=True)
            for index, (_, param) in enumerate(shard)
        ]

    def _on_gradient(self, client: ShardClient, index: int, _: Tensor) -> None:
        if self._is_streaming:
            client.on_gradient_ready(index)

    def __getattr__(self, name: str) -> Any:
        """Explain why a method of the optimizer on the other rank is not available here."""
        # From __dict__: before the constructor has set it, its lookup would come here again.
        local = self.__dict__.get("optimizer")
        if not name.startswith("_") and hasattr(local, name):
            raise AttributeError(
                f"{name!r} of {type(local).__name__} cannot be used here: the optimizer is on "
                "another rank, and workers can only send it gradients and request steps. Use an "
                "optimizer without such methods, or a strategy whose workers step by themselves."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; only the constructor may do so.

        Raises:
            RuntimeError: At any later time, since the optimizer on the other rank gets no more.
        """
        if getattr(self, "_are_groups_final", False):
            raise RuntimeError(
                "A parameter group was added to the optimizer after the start, but only the "
                "parameters that it has then are exchanged. Give it all of them in "
                "configure_optimizers, or call fit again."
            )
        super().add_param_group(param_group)

    def set_local_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer, of the same groups, that monitors of learning rates use instead."""
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    def receive_weights(self) -> None:
        """Receive parameters and hyper-parameters from the servers.

        Raises:
            ValueError: If a server has another model.
            RuntimeError: If a server has ended or timed out.
        """
        for client in self._clients if self._replica.is_leader else ():
            client.join()
        self._receive_weights()

    # ------------------------------------------------------------------- steps

    def expect_backward(self) -> None:
        """Send gradients while the next backward pass computes them.

        Call it before the last backward pass of a step. Do not change the gradients between this
        call and :meth:`step`.
        """
        if self._replica.is_leader:
            self._is_streaming = True
            for client in self._clients:
                client.expect_gradients()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients by their mean over all workers.

        For code that reads or changes gradients before :meth:`step`, which sends them again. All
        workers must call it, and make the same changes. A parameter gets a gradient if any worker
        has one for it.

        Raises:
            RuntimeError: After :meth:`expect_backward`, or if a server has ended or timed out.
        """
        if self._is_streaming:
            raise RuntimeError(
                "average_gradients was called after expect_backward, which sends the gradients "
                "already. Call one of them in a step."
            )
        self._check_gradients()
        start = time.perf_counter()
        for client in self._clients:
            client.start_averaging(self._replica.is_leader)
        for client in self._clients:
            client.finish_averaging(self._replica.broadcast_tensor, self._replica.is_leader)
        self.wait_s += time.perf_counter() - start

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the mean gradient in the next step, by the norm of all parameters.

        Raises:
            ValueError: If ``max_norm`` is not positive.
        """
        self._clip = ClippingSettings("norm", _positive("max_norm", max_norm))

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the mean gradient in the next step, element by element.

        Raises:
            ValueError: If ``clip_value`` is not positive.
        """
        self._clip = ClippingSettings("value", _positive("clip_value", clip_value))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the servers take a step, and wait for the new parameters.

        Args:
            closure: Computes the gradients, if given.

        Returns:
            The return value of the closure.

        Raises:
            RuntimeError: If a server has ended or timed out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reach("local step")
        self._check_gradients()
        start = time.perf_counter()
        request = StepRequest(clip=self._clip, stop=self._stop_reason)
        self._clip = None
        if self._replica.is_leader:
            self._request_step(request)
        self._receive_weights()
        # The other ranks of the worker have no connection to the servers.
        self.stop_agreed = self._replica.broadcast_text(self.stop_agreed)
        self.wait_s += time.perf_counter() - start
        return loss

    def _check_gradients(self) -> None:
        """Refuse sparse gradients, and parameters that have become trainable after the start."""
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

    def _request_step(self, request: StepRequest) -> None:
        """Send everything for a step and wait for it; :meth:`_receive_weights` finishes it."""
        self._is_streaming = False
        # All requests before the first wait: a server that needs the norms of the others' gradients
        # waits for them.
        for client in self._clients:
            reach("requesting a step")
            client.request_step(request)
        reach("after sending")
        for client in self._clients:
            client.send_changed_parameters()
        for stop in [client.wait_for_step() for client in self._clients]:
            self.stop_agreed = stop or self.stop_agreed

    @torch.no_grad()
    def _receive_weights(self) -> None:
        reach("outer step")
        for client in self._clients:
            client.receive_weights(self._replica.broadcast_tensor)

    def are_finite(self, here: bool) -> bool:
        """Return whether all workers' gradients are finite, and those ``here``; for scalers."""
        finite = here
        if self._replica.is_leader:
            # A list, so that all servers are asked: each waits for the request of all workers.
            finite = all([client.are_finite(here) for client in self._clients])
        return self._replica.broadcast_text("finite" if finite else None) is not None

    # -------------------------------------------------------- stop and sync points

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step; safe to call from a signal handler.

        ``stop_agreed`` is the reason, on all of them, after that step.
        """
        self._stop_reason = reason

    @torch.no_grad()
    def sync_point(self, purpose: str) -> None:
        """Wait until all workers are at the same sync point; others take steps meanwhile.

        Afterwards all of them have the parameters of the last step.

        Args:
            purpose: Purpose of the sync point, equal on all workers.

        Raises:
            RuntimeError: If others are at another sync point, or have ended or timed out.
        """
        behind = False
        if self._replica.is_leader:
            for client in self._clients:
                client.request_sync_point(purpose, self._stop_reason)
            for reply in [client.wait_for_sync_point() for client in self._clients]:
                self.stop_agreed = reply["stop"] or self.stop_agreed
                behind = behind or reply["behind"]
        # Others have stepped since this worker's last step, as it has had fewer batches.
        if self._replica.broadcast_text("behind" if behind else None) is not None:
            for client in self._clients:
                client.load_current_weights(self._replica.broadcast_tensor, self._replica.is_leader)

    # ------------------------------------------------------------------- state

    @property
    def has_changed_parameters(self) -> bool:
        """Whether parameters were changed outside the optimizer since they were received."""
        return any(client.has_changed_parameters for client in self._clients)

    def full_precision_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with the server's value, which was not rounded by compression."""
        return [
            (param, value)
            for client, shard in zip(self._clients, self._shards, strict=True)
            for (_, param), value in zip(shard, client.parameters(), strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer on the other rank, as its own ``state_dict`` does.

        One worker may call it, between two steps.
        """
        content = super().state_dict()
        if self._replica.is_leader:
            state = OptimizerState.join([client.state() for client in self._clients])
            content["state"] = state.values
            for group, remote in zip(content["param_groups"], state.groups, strict=True):
                group.update({name: v for name, v in remote.items() if name not in group})
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer on the other rank, and its hyper-parameters here.

        One worker may call it, or all with the same state, between two steps.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
        ]
        if self._replica.is_leader:
            state = OptimizerState(state_dict["state"], groups)
            for client, shard in zip(self._clients, self._shards, strict=True):
                client.load_state(state.select([index for index, _ in shard]))
        for present, group in zip(self.param_groups, groups, strict=True):
            present.update(group)

    # --------------------------------------------------------------------- end

    def leave(self, farewell: dict[str, Any] | None = None) -> None:
        """Leave the servers: this worker takes no more steps. A second call does nothing.

        Args:
            farewell: Final values for the service ranks; see :func:`serve`.
        """
        if self._start_leaving():
            for client in self._clients:
                client.leave(farewell)
            self._release_clients()

    def fail(self, error: BaseException) -> None:
        """Leave because of an error, which the other ranks then raise with this rank's name."""
        if self._start_leaving():
            for client in self._clients:
                with suppress(RuntimeError):
                    client.leave(failure=f"{type(error).__name__}: {error}")
            self._release_clients()

    def _start_leaving(self) -> bool:
        """Mark this worker as left; return whether its servers are still to be notified."""
        has_left, self.has_left = self.has_left, True
        self.remove_hooks()
        return self._replica.is_leader and not has_left

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters; no more steps can be taken."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for client in self._clients:
            client.close()

    def release(self) -> None:
        """Drop all connections without leaving; may be called twice."""
        self.remove_hooks()
        self._release_clients()
        self._replica.release()

    def _release_clients(self) -> None:
        for client in self._clients:
            client.release()

    @property
    def bytes_sent(self) -> int:
        """All bytes that this rank has sent to the servers."""
        return sum(client.connection.bytes_sent for client in self._clients)

    @property
    def bytes_saved(self) -> int:
        """Bytes of gradients that compression has saved."""
        return sum(client.bytes_saved for client in self._clients)

    @property
    def bytes_received(self) -> int:
        """All bytes that this rank has received from the servers."""
        return sum(client.connection.bytes_received for client in self._clients)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return float(value)


class ClientRanks:
    """The ranks of one worker, with gloo, of which the first is the client of the servers.

    Without a group the worker has a single rank. ``is_leader``: this rank is the first one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.is_leader = group is None or dist.get_rank(group) == 0

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the first rank's tensor."""
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            dist.broadcast(tensor, source, group=self._group)

    def broadcast_text(self, text: str | None) -> str | None:
        """Return the first 32 bytes of the first rank's text; None if it has none."""
        if self._group is None:
            return text
        memory = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        for position, byte in enumerate((text or "").encode()[:_TEXT_BYTES]):
            memory[position] = byte
        self.broadcast_tensor(memory)
        return bytes(memory.tolist()).rstrip(b"\0").decode() or None

    def release(self) -> None:
        """Drop the reference to the group; nothing can be broadcast afterwards."""
        self._group = None
