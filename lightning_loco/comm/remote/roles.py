"""What each rank runs, without Lightning: training, or one of the services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.remote.accumulator import Accumulator
from lightning_loco.comm.remote.backends import Backend, LocalBackend, RemoteBackend
from lightning_loco.comm.remote.optimizer import (
    RemoteOptimizer,
    model_checksum,
    trainable_parameters,
)
from lightning_loco.comm.remote.plan import Message, plan_messages, share_parameters
from lightning_loco.comm.remote.server import Server
from lightning_loco.comm.remote.tiers import Role, Tiers
from lightning_loco.comm.remote.transport import Transport
from lightning_loco.comm.remote.wire import Lane, Wire

T = TypeVar("T")
Callback = Callable[[], object]


class Serving(NamedTuple):
    """How a service rank serves.

    Attributes:
        before_step: Called where the optimizer is when the mean gradients are in place.
        after_step: Called there after each step, to step a schedule for instance.
        min_workers: With how many workers to go on when some fail. Default: all.
        stop_reason: Says why all should stop after a step, if this rank was asked to.
    """

    before_step: Callback | None = None
    after_step: Callback | None = None
    min_workers: int | None = None
    stop_reason: Callable[[], str | None] = lambda: None


def worker(
    train: Callable[[RemoteOptimizer], T],
    params: Any,
    tiers: Tiers,
    *,
    transport: Transport | None = None,
    replica_group: dist.ProcessGroup | None = None,
) -> T:
    """Train with the parameters of the servers, and leave them when ``train`` has returned.

    Args:
        train: The training loop; gets the :class:`RemoteOptimizer`.
        params: As for a ``torch.optim`` optimizer.
        tiers: The roles of all ranks.
        transport: How the ranks are connected.
        replica_group: The ranks of this worker, if there are several.

    Returns:
        What ``train`` has returned.
    """
    remote = RemoteOptimizer(
        params, tiers.aggregators, transport=transport, replica_group=replica_group
    )
    remote.receive_weights()
    result = train(remote)
    remote.leave()
    return result


def aggregator_optimizer(
    optimizer: torch.optim.Optimizer,
    tiers: Tiers,
    *,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Average the workers' gradients and make the steps, until all workers have left (2 tiers).

    Args:
        optimizer: Any that needs no closure, of the model's parameters in the workers' order.
        tiers: The roles of all ranks.
        transport: How the ranks are connected, as on the workers.
        serving: What happens around the steps.

    Returns:
        What the workers said when they left.

    Raises:
        ValueError: If a worker has another model.
        RuntimeError: If a worker is gone or too late.
    """
    site = _Site.of(optimizer.param_groups, tiers, transport)
    backend = site.local_backend(optimizer, serving or Serving())
    return site.serve(site.workers(), site.messages, backend, serving or Serving())


def aggregator(
    params: Any,
    tiers: Tiers,
    *,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Average the workers' gradients for the optimizer on another rank (3 tiers).

    Args:
        params: The model's parameters or parameter groups, for their shapes.
        tiers: The roles of all ranks.
        transport: How the ranks are connected, as on the workers.
        serving: With how many workers to go on.

    Returns:
        What the workers said when they left.

    Raises:
        ValueError: If a worker or the optimizer has another model.
        RuntimeError: If one of them is gone or too late.
    """
    site = _Site.of(torch.optim.Optimizer(params, {}).param_groups, tiers, transport)
    rank = tiers.optimizers[site.number]
    wire = site.transport.wire(rank, tiers.name(rank))
    backend = RemoteBackend(wire, site.params, site.messages, site.accumulator)
    return site.serve(site.workers(), site.messages, backend, serving or Serving())


def optimizer(
    optimizer: torch.optim.Optimizer,
    tiers: Tiers,
    *,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Make the steps with the aggregator's averaged gradients, until it leaves (3 tiers).

    Args:
        optimizer: Any that needs no closure, of the model's parameters in the workers' order.
        tiers: The roles of all ranks.
        transport: How the ranks are connected, as on the workers.
        serving: What happens around the steps.

    Returns:
        What the workers said when they left.

    Raises:
        ValueError: If the aggregator has another model.
        RuntimeError: If the aggregator is gone or too late.
    """
    site = _Site.of(optimizer.param_groups, tiers, transport)
    backend = site.local_backend(optimizer, serving or Serving())
    rank = tiers.aggregators[site.number]
    client = site.transport.wire(rank, tiers.name(rank))
    summed = [message._replace(dtype=site.accumulator.dtype) for message in site.messages]
    alone = (serving or Serving())._replace(min_workers=None)
    return site.serve([client], summed, backend, alone)


def run_role(
    train: Callable[[RemoteOptimizer], T],
    params: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    num_workers: int,
    *,
    num_servers: int = 1,
    replica_size: int = 1,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> T | None:
    """Train or serve, as this rank of the process group is meant to: call it on all ranks.

    Args:
        train: The workers' training loop; gets the :class:`RemoteOptimizer`.
        params: As for a ``torch.optim`` optimizer, the same on all ranks.
        make_optimizer: Makes the optimizer of ``params``, where it is needed.
        num_workers: The first ranks train; how many serve them tells the tiers.
        num_servers: Shares of the parameters, each with ranks of its own.
        replica_size: Ranks of one worker.
        transport: How the ranks are connected.
        serving: What happens around the steps.

    Returns:
        What ``train`` has returned; None on ranks that serve.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If the number of ranks does not fit, or the models differ.
        RuntimeError: If another rank is gone or too late.

    Example::

        run_role(train, model.parameters(), torch.optim.AdamW, num_workers=4)  # on 5 or 6 ranks
    """
    group = (transport or Transport()).group or dist.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    tiers = Tiers.detect(size, num_workers, num_servers, replica_size)
    role = tiers.role(rank)
    if role is Role.WORKER:
        replica = new_replica_group(tiers, rank) if replica_size > 1 else None
        return worker(train, params, tiers, transport=transport, replica_group=replica)
    if replica_size > 1:
        new_replica_group(tiers, rank)
    if role is Role.AGGREGATOR:
        aggregator(params, tiers, transport=transport, serving=serving)
    elif role is Role.OPTIMIZER:
        optimizer(make_optimizer(params), tiers, transport=transport, serving=serving)
    else:
        aggregator_optimizer(make_optimizer(params), tiers, transport=transport, serving=serving)
    return None


def new_replica_group(tiers: Tiers, rank: int) -> dist.ProcessGroup | None:
    """Make the groups of all workers' ranks; call it on every rank of the default group.

    Returns:
        The group of this rank's worker; None for ranks that serve.
    """
    mine = None
    for first in tiers.leaders:
        ranks = list(range(first, first + tiers.replica_size))
        group = dist.new_group(ranks, backend="gloo")
        if rank in ranks:
            mine = group
    return mine


class _Site:
    """A service rank's place: its share of the parameters, and its memory."""

    def __init__(
        self, params: Sequence[Tensor], number: int, tiers: Tiers, transport: Transport
    ) -> None:
        share = share_parameters(params, tiers.num_servers)
        self.shares = share
        self.params = [params[index] for index in share[number]]
        self.number = number
        self.tiers = tiers
        self.transport = transport
        self.messages = plan_messages(self.params, transport.bucket_bytes, transport.wire_dtype)
        self.accumulator = Accumulator(self.params, self.messages)

    @classmethod
    def of(cls, groups: Any, tiers: Tiers, transport: Transport | None) -> _Site:
        """The place of this rank."""
        trainable, _ = trainable_parameters(groups)
        transport = transport or Transport()
        group = transport.group
        rank = dist.get_rank() if group is None else group.rank()
        return cls([param for _, param in trainable], tiers.server(rank), tiers, transport)

    def workers(self) -> list[Wire]:
        """Connections to the ranks that speak for the workers."""
        return [self.transport.wire(rank, self.tiers.name(rank)) for rank in self.tiers.leaders]

    def local_backend(self, optimizer: torch.optim.Optimizer, serving: Serving) -> LocalBackend:
        """The optimizer of this process."""
        return LocalBackend(
            optimizer,
            self.params,
            self.messages,
            self.accumulator,
            serving.before_step,
            serving.after_step,
            self._share_norms if self.tiers.num_servers > 1 else None,
        )

    def serve(
        self,
        clients: Sequence[Wire],
        messages: Sequence[Message],
        backend: Backend,
        serving: Serving,
    ) -> dict[str, Any]:
        """Serve until all clients have left."""
        server = Server(
            clients,
            messages,
            self.accumulator,
            backend,
            model_checksum(self.params, self.messages),
            timeout_s=self.transport.timeout_s,
            min_workers=serving.min_workers,
            stop_reason=serving.stop_reason,
            look_around=self.transport.look_around,
        )
        server.serve()
        return server.farewell

    def _share_norms(self, norms: list[Tensor]) -> list[Tensor]:
        """All parameters' norms in their order, from all optimizers."""
        own = torch.stack(norms).double()
        peers = [
            (share, self.transport.wire(rank, self.tiers.name(rank)))
            for number, (share, rank) in enumerate(
                zip(self.shares, self.tiers.optimizers, strict=True)
            )
            if number != self.number
        ]
        sending = [(wire, wire.send(own, Lane.STATE)) for _, wire in peers]
        norm_of = dict(zip(self.shares[self.number], own, strict=True))
        for share, wire in peers:
            theirs = torch.zeros(len(share), dtype=torch.float64)
            wire.wait(wire.receive(theirs, Lane.STATE), "the norms of gradients")
            norm_of.update(zip(share, theirs, strict=True))
        for wire, work in sending:
            wire.wait(work, "the norms of gradients")
        return [norm_of[index].to(norms[0].dtype) for index in sorted(norm_of)]
