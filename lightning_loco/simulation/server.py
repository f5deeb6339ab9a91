"""A server of a simulated remote optimizer, and the workers' side of it, in the same process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_loco.parameter_server import Transport
from lightning_loco.parameter_server.backends import LocalBackend, check_optimizer
from lightning_loco.parameter_server.buckets import (
    Accumulator,
    BucketBuffer,
    ParamBucket,
    shard_parameters,
    trainable_parameters,
)
from lightning_loco.parameter_server.optimizer import check_gradients
from lightning_loco.parameter_server.protocol import GradientClipping, StepRequest
from lightning_loco.parameter_server.server import BucketMean, check_changes
from lightning_loco.parameter_server.server_client import ChangeDetector

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a server for its copy of the model."""


class SimulatedServer:
    """A server with its shard of the parameters, and the workers' side of it.

    Args:
        models: Those of the workers.
        make_optimizer: Makes the optimizer of a copy of the first one.
        transport: Says how buckets are made and encoded.
        number: Number of the shard.
        num_servers: Number of shards.
        is_relayed: Whether another rank has the optimizer (3 tiers).
        exchange_norms: As in :class:`~lightning_loco.parameter_server.backends.LocalBackend`.

    Attributes:
        optimizer: Steps the parameters of the shard.
        indices: The parameters of the shard, by their number in the optimizer.
        names: Their names in the model.
        params: Their values here, in full precision.
        missing: Numbers of those without a gradient in the present step.
        message_bytes: Bytes of all gradients of one worker.
        adds_to_first: Whether the gradients of worker 0 are received into the sum.
        relayed_bytes: Bytes on the way to the optimizer and back when all gradients are here: of
            the last bucket of gradients, and of the first one of parameters.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        transport: Transport,
        number: int,
        num_servers: int,
        is_relayed: bool,
        exchange_norms: Callable[[list[Tensor]], list[Tensor]] | None,
    ) -> None:
        model = copy.deepcopy(models[0])
        self.optimizer = make_optimizer(model)
        check_optimizer(self.optimizer)
        name_of = {id(param): name for name, param in model.named_parameters()}
        trainable, frozen = trainable_parameters(self.optimizer.param_groups)
        if not all(id(param) in name_of for param in (*(p for _, p in trainable), *frozen)):
            raise ValueError(
                "make_optimizer must use the parameters of the model that it is called with."
            )
        self.indices = shard_parameters([p for _, p in trainable], num_servers)[number]
        self.params = [trainable[index][1] for index in self.indices]
        self.names = [name_of[id(param)] for param in self.params]
        self.missing: tuple[int, ...] = ()
        self._is_relayed = is_relayed
        self._buckets = transport.plan_buckets(self.params)
        self._accumulator = accumulator = Accumulator(self.params, self._buckets)
        self.backend = LocalBackend(
            self.optimizer,
            self.params,
            self._buckets,
            accumulator,
            exchange_norms=exchange_norms,
        )
        self.message_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        last, dtype = self._buckets[-1], accumulator.dtype
        self.adds_to_first = all(bucket.wire_dtype == dtype for bucket in self._buckets)
        summed = last if last.codec is not None else last._replace(dtype=dtype)
        self.relayed_bytes = summed.num_bytes + self._buckets[0].num_bytes
        frozen_names = [name_of[id(param)] for param in frozen]
        self._sides = [_WorkerSide(one, self.names, frozen_names, self._buckets) for one in models]
        self.send_parameters(range(len(models)))

    def average(self, workers: Sequence[int], clip: GradientClipping | None) -> StepRequest:
        """Average the gradients of some workers; return what they request.

        RuntimeError if a gradient is not finite, or parameters were changed in different ways.
        """
        requests = {worker: self._sides[worker].request(clip) for worker in workers}
        self.backend.start_step(None)
        for index, bucket in enumerate(self._buckets):
            mean = BucketMean(bucket, total := self._accumulator.buckets[index])
            for worker in workers:
                mean.add(f"Worker {worker}", self._sides[worker].gradient(index))
            if (not_finite := mean.finish()) is not None:
                raise RuntimeError(not_finite)
            if self._is_relayed and bucket.codec is not None:
                encoded = torch.empty(bucket.num_bytes, dtype=torch.uint8, device="cpu")
                bucket.decode(bucket.encode(total, encoded), total)
            self.backend.add_bucket(index)
        check_changes({f"Worker {worker}": one.changed for worker, one in requests.items()})
        request = StepRequest.merge(list(requests.values()))
        if any(one.changed for one in requests.values()):
            self.backend.load_parameters(self._sides[workers[0]].params)
        self.missing = request.missing
        return request

    def send_parameters(self, workers: Iterable[int]) -> None:
        """Give some workers the parameters, as they are sent."""
        receivers = [self._sides[worker] for worker in workers]
        for index in range(len(self._buckets)):
            encoded = self.backend.weights(index)
            for receiver in receivers:
                receiver.receive(index, encoded)
        for receiver in receivers:
            receiver.changes.record()


class _WorkerSide:
    """A worker's parameters of one server, and the buffers in which it sends and receives them."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        frozen: Sequence[str],
        buckets: Sequence[ParamBucket],
    ) -> None:
        named = dict(model.named_parameters())
        self.params = [named[name] for name in names]
        self.changes = ChangeDetector(self.params)
        self._frozen = [named[name] for name in frozen]
        self._buffers = [BucketBuffer(bucket, self.params) for bucket in buckets]

    def request(self, clip: GradientClipping | None) -> StepRequest:
        """Return the request for a step."""
        check_gradients([{"params": self.params}], self._frozen)
        missing = tuple(i for i, param in enumerate(self.params) if param.grad is None)
        return StepRequest(missing, clip=clip, changed=self.changes.changed_checksum())

    def gradient(self, index: int) -> Tensor:
        """Return the gradients of a bucket, as they are sent."""
        buffer = self._buffers[index]
        return buffer.pack({number: self.params[number].grad for number in buffer.indices})

    @torch.no_grad()
    def receive(self, index: int, encoded: Tensor) -> None:
        """Write the parameters of a bucket."""
        buffer = self._buffers[index]
        buffer.receive_buffer(self.params).copy_(encoded)
        buffer.unpack(self.params)
