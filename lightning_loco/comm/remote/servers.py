"""The ranks that do not train: the aggregator, the optimizer, and both in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.remote.optimizer import model_checksum
from lightning_loco.comm.remote.wire import BUCKET_BYTES, FlatTensors, Header, Kind, Wire


class Backend(Protocol):
    """Where averaged gradients go and parameters come from."""

    def load_weights(self, buffer: FlatTensors) -> None:
        """Fill the buffer with the parameters."""

    def step(self, buffer: FlatTensors, present: Sequence[bool]) -> None:
        """Make a step with the gradients in the buffer, then fill it with the parameters."""

    def end(self) -> None:
        """All workers have left."""


class LocalBackend:
    """An optimizer in this process.

    Args:
        optimizer: Of the parameters.
        params: In the order of the workers.
        before_step: Called when the mean gradients are in place, to clip them for instance.
        after_step: Called after each step, to step a schedule for instance.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        before_step: Callable[[], object] | None,
        after_step: Callable[[], object] | None,
    ) -> None:
        self._optimizer = optimizer
        self._params = params
        self._before_step = before_step
        self._after_step = after_step

    def load_weights(self, buffer: FlatTensors) -> None:
        """Copy the parameters."""
        buffer.load(self._params)

    def step(self, buffer: FlatTensors, present: Sequence[bool]) -> None:
        """Make a step; the gradients are views of the buffer."""
        for param, part, has_grad in zip(self._params, buffer.parts, present, strict=True):
            param.grad = part.to(param.dtype) if has_grad else None
        if self._before_step is not None:
            self._before_step()
        self._optimizer.step()
        if self._after_step is not None:
            self._after_step()
        for param in self._params:
            param.grad = None
        buffer.load(self._params)

    def end(self) -> None:
        """Nothing to do."""


class RemoteBackend:
    """An optimizer on another rank.

    Args:
        wire: To that rank.
        checksum: Of the model.
    """

    def __init__(self, wire: Wire, checksum: int) -> None:
        self._wire = wire
        self._checksum = checksum

    def load_weights(self, buffer: FlatTensors) -> None:
        """Ask for the parameters."""
        self._wire.receive_weights(self._checksum, buffer.buckets)

    def step(self, buffer: FlatTensors, present: Sequence[bool]) -> None:
        """Pass the gradients on and wait for the parameters."""
        self._wire.step(present, buffer.buckets)

    def end(self) -> None:
        """Tell the other rank."""
        self._wire.say_goodbye()


class Server:
    """Serves clients, in lockstep, until all have left.

    Args:
        clients: The ranks that send gradients, in the order of the sum.
        params: Parameters of the model; their shapes.
        backend: Where the mean goes.
        bucket_bytes: As on the workers.
    """

    def __init__(
        self,
        clients: Sequence[Wire],
        params: Sequence[Tensor],
        backend: Backend,
        bucket_bytes: int,
    ) -> None:
        self._clients = list(clients)
        self._buffer = FlatTensors(params, bucket_bytes)
        longest = self._buffer.buckets[0]
        self._inboxes = [longest.new_empty(2, len(longest)) for _ in self._clients[1:]]
        self._checksum = model_checksum(params)
        self._count = len(params)
        self._backend = backend

    @torch.no_grad()
    def serve(self) -> None:
        """Answer until all clients have left.

        Raises:
            ValueError: If a client has another model.
            RuntimeError: If a client is gone, too late, or not where the others are.
        """
        while self._clients:
            headers = [(c, c.receive_header("the next request")) for c in self._clients]
            self._clients = [c for c, header in headers if header.kind != Kind.LEAVE]
            headers = [(c, header) for c, header in headers if header.kind != Kind.LEAVE]
            kinds = {header.kind for _, header in headers}
            if len(kinds) > 1:
                raise RuntimeError(
                    "Workers ask for different things: "
                    + ", ".join(f"{c.name} {Kind(header.kind).name}" for c, header in headers)
                    + ". Call receive_weights on all of them before the first step."
                )
            if kinds == {Kind.WEIGHTS}:
                self._answer_weights(headers)
            elif kinds == {Kind.STEP}:
                self._make_step(headers)
        self._backend.end()

    def _answer_weights(self, headers: Sequence[tuple[Wire, Header]]) -> None:
        others = [client.name for client, header in headers if header.detail != self._checksum]
        for client, header in headers:
            fits = header.detail == self._checksum
            client.send_header(Header(Kind.ACCEPTED if fits else Kind.OTHER_MODEL))
        if others:
            raise ValueError(f"Another model on: {', '.join(others)}. Build the same on all ranks.")
        self._backend.load_weights(self._buffer)
        self._send_weights()

    def _make_step(self, headers: Sequence[tuple[Wire, Header]]) -> None:
        masks = [
            client.receive_mask(self._count) if header.detail else [True] * self._count
            for client, header in headers
        ]
        self._receive_mean()
        self._backend.step(self._buffer, [any(has) for has in zip(*masks, strict=True)])
        self._send_weights()

    def _receive_mean(self) -> None:
        """Sum bucket by bucket in the order of the clients, then divide."""
        first, *others = self._clients
        buckets = self._buffer.buckets
        arrivals = [first.receive(bucket) for bucket in buckets]
        coming = self._receive_bucket(0, others)
        for index, (bucket, arrival) in enumerate(zip(buckets, arrivals, strict=True)):
            first.wait(arrival, "its gradients")
            here, coming = coming, self._receive_bucket(index + 1, others)
            for client, inbox, work in here:
                client.wait(work, "its gradients")
                bucket.add_(inbox)
            bucket.div_(len(self._clients))

    def _receive_bucket(
        self, index: int, clients: Sequence[Wire]
    ) -> list[tuple[Wire, Tensor, dist.Work]]:
        """Begin to receive one bucket of each client, if there are so many, beside the last one."""
        if index >= len(self._buffer.buckets):
            return []
        length = len(self._buffer.buckets[index])
        inboxes = [pair[index % 2][:length] for pair in self._inboxes]
        return [(c, inbox, c.receive(inbox)) for c, inbox in zip(clients, inboxes, strict=False)]

    def _send_weights(self) -> None:
        works = [
            (client, client.send(bucket))
            for bucket in self._buffer.buckets
            for client in self._clients
        ]
        for client, work in works:
            client.wait(work, "the parameters")


def aggregator_optimizer(
    optimizer: torch.optim.Optimizer,
    params: Iterable[Tensor],
    num_workers: int,
    *,
    before_step: Callable[[], object] | None = None,
    after_step: Callable[[], object] | None = None,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Average the workers' gradients and make the steps, until all workers have left (2 tiers).

    Args:
        optimizer: Any of ``torch.optim`` that needs no closure.
        params: The model's parameters, in the order of the workers.
        num_workers: They are ranks 0 to ``num_workers - 1`` of ``group``.
        before_step: Called when the mean gradients are in place, to clip them for instance.
        after_step: Called after each step, to step a schedule for instance.
        group: Default: the default process group.
        bucket_bytes: As on the workers.

    Raises:
        ValueError: If a worker has another model.
        RuntimeError: If a worker is gone or too late.
    """
    params = list(params)
    backend = LocalBackend(optimizer, params, before_step, after_step)
    Server(_workers(num_workers, group), params, backend, bucket_bytes).serve()


def aggregator(
    params: Iterable[Tensor],
    num_workers: int,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Average the workers' gradients for the optimizer on the next rank (3 tiers).

    Args:
        params: The model's parameters, for their shapes, in the order of the workers.
        num_workers: They are ranks 0 to ``num_workers - 1`` of ``group``; the optimizer is on rank
            ``num_workers + 1``.
        group: Default: the default process group.
        bucket_bytes: As on the workers.

    Raises:
        ValueError: If a worker or the optimizer has another model.
        RuntimeError: If one of them is gone or too late.
    """
    params = list(params)
    rank = num_workers + 1
    wire = Wire(rank, f"The optimizer (rank {rank})", group)
    backend = RemoteBackend(wire, model_checksum(params))
    Server(_workers(num_workers, group), params, backend, bucket_bytes).serve()


def optimizer(
    optimizer: torch.optim.Optimizer,
    params: Iterable[Tensor],
    num_workers: int,
    *,
    before_step: Callable[[], object] | None = None,
    after_step: Callable[[], object] | None = None,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Make the steps with the aggregator's averaged gradients, until it leaves (3 tiers).

    Args:
        optimizer: Any of ``torch.optim`` that needs no closure.
        params: The model's parameters, in the order of the workers.
        num_workers: The aggregator is on rank ``num_workers`` of ``group``.
        before_step: Called when the mean gradients are in place, to clip them for instance.
        after_step: Called after each step, to step a schedule for instance.
        group: Default: the default process group.
        bucket_bytes: As on the workers.

    Raises:
        ValueError: If the aggregator has another model.
        RuntimeError: If the aggregator is gone or too late.
    """
    params = list(params)
    backend = LocalBackend(optimizer, params, before_step, after_step)
    client = Wire(num_workers, f"The aggregator (rank {num_workers})", group)
    Server([client], params, backend, bucket_bytes).serve()


def _workers(num_workers: int, group: dist.ProcessGroup | None) -> list[Wire]:
    return [Wire(rank, f"Worker {rank}", group) for rank in range(num_workers)]
