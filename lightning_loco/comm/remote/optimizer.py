"""The optimizer as a worker sees it: gradients leave, parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.peers import schema_checksum
from lightning_loco.comm.remote.wire import BUCKET_BYTES, FlatTensors, Wire


def model_checksum(params: Iterable[Tensor]) -> int:
    """63 bits that tell models with other shapes apart."""
    return schema_checksum([tuple(param.shape) for param in params]) >> 1


class RemoteOptimizer(torch.optim.Optimizer):
    """Sends the gradients to the aggregator and takes over the parameters after its step.

    The step is the optimizer's on another rank, with the mean of all workers' gradients; learning
    rates and their schedules are there, too. A parameter without a gradient counts as zero where
    another worker has one, and is left out of the step where none has.

    Args:
        params: The model's parameters, in the same order on all ranks.
        aggregator_rank: The rank in ``group`` that runs :func:`aggregator` or
            :func:`aggregator_optimizer`.
        group: Default: the default process group. Its timeout holds for every exchange.
        bucket_bytes: Length of the pieces in which gradients and parameters travel.

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
        aggregator_rank: int,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(params, {})
        self._params = [param for entry in self.param_groups for param in entry["params"]]
        self._buffer = FlatTensors(self._params, bucket_bytes)
        self._checksum = model_checksum(self._params)
        self._wire = Wire(aggregator_rank, f"The aggregator (rank {aggregator_rank})", group)
        self._left = False

    def receive_weights(self) -> None:
        """Take over the parameters of the rank that has the optimizer.

        Raises:
            ValueError: If it has another model.
            RuntimeError: If it is gone or too late.
        """
        self._wire.receive_weights(self._checksum, self._buffer.buckets)
        self._unpack()

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
        present = self._buffer.load([param.grad for param in self._params])
        self._wire.step(present, self._buffer.buckets)
        self._unpack()
        return loss

    @torch.no_grad()
    def _unpack(self) -> None:
        torch._foreach_copy_(self._params, self._buffer.parts)

    def leave(self) -> None:
        """Say that this worker makes no more steps; a second call does nothing."""
        if not self._left:
            self._left = True
            self._wire.say_goodbye()
