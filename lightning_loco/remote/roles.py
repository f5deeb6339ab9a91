"""What each rank runs, without Lightning: training, or one of the services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_loco.remote.backends import RemoteBackend
from lightning_loco.remote.optimizer import RemoteOptimizer
from lightning_loco.remote.replica_group import new_replica_group
from lightning_loco.remote.site import Serving, Site
from lightning_loco.remote.tiers import Role, Tiers
from lightning_loco.remote.transport import Transport

T = TypeVar("T")


def worker(
    train: Callable[[RemoteOptimizer], T],
    params: Any,
    tiers: Tiers,
    *,
    transport: Transport | None = None,
    replica_group: dist.ProcessGroup | None = None,
) -> T:
    """Train with the parameters of the servers, and leave them when ``train`` has returned.

    An error in ``train`` reaches the other ranks, too.

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
    try:
        result = train(remote)
    except Exception as error:
        remote.fail(error)
        raise
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
    site = Site.of(optimizer.param_groups, tiers, transport)
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
    site = Site.of(torch.optim.Optimizer(params, {}).param_groups, tiers, transport)
    rank = tiers.optimizers[site.number]
    wire = site.wire(rank)
    site.meanwhile.reassure(wire.reassure_server)
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
    site = Site.of(optimizer.param_groups, tiers, transport)
    backend = site.local_backend(optimizer, serving or Serving())
    rank = tiers.aggregators[site.number]
    client = site.wire(rank)
    summed = [
        message if message.codec is not None else message._replace(dtype=site.accumulator.dtype)
        for message in site.messages
    ]
    alone = (serving or Serving())._replace(min_workers=None)
    return site.serve([client], summed, backend, alone, are_heard=True)


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
    replica = new_replica_group(tiers, rank, "gloo") if replica_size > 1 else None
    if tiers.role(rank) is Role.WORKER:
        return worker(train, params, tiers, transport=transport, replica_group=replica)
    serve(params, make_optimizer, tiers, rank, transport=transport, serving=serving)
    return None


def serve(
    params: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    tiers: Tiers,
    rank: int,
    *,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Serve as a rank that does not train is meant to.

    Args:
        params: As for a ``torch.optim`` optimizer, the same on all ranks.
        make_optimizer: Makes the optimizer of ``params``, if it is this rank's.
        tiers: The roles of all ranks.
        rank: This one.
        transport: How the ranks are connected, as on the workers.
        serving: What happens around the steps.

    Returns:
        What the workers said when they left.

    Raises:
        ValueError: If a worker has another model.
        RuntimeError: If another rank is gone or too late.
    """
    role = tiers.role(rank)
    if role is Role.AGGREGATOR:
        return aggregator(params, tiers, transport=transport, serving=serving)
    step = optimizer if role is Role.OPTIMIZER else aggregator_optimizer
    return step(make_optimizer(params), tiers, transport=transport, serving=serving)
