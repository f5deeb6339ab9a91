"""What each rank runs, without Lightning: training, or one of the services."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_loco.parameter_server.backends import Backend, LocalBackend, RemoteBackend
from lightning_loco.parameter_server.buckets import (
    Accumulator,
    Message,
    model_checksum,
    share_parameters,
    trainable_parameters,
)
from lightning_loco.parameter_server.keep_alive import Meanwhile
from lightning_loco.parameter_server.optimizer import RemoteOptimizer
from lightning_loco.parameter_server.protocol import Lane, Transport, Wire
from lightning_loco.parameter_server.server import GradientServer
from lightning_loco.parameter_server.tiers import Role, Tiers, new_replica_group

T = TypeVar("T")


class Serving(NamedTuple):
    """How a service rank serves.

    Attributes:
        after_step: Called where the optimizer is after each step, to step a schedule for instance.
        min_workers: With how many workers to go on when some fail. Default: all.
        stop_reason: Says why all should stop after a step, if this rank was asked to.
    """

    after_step: Callable[[], object] | None = None
    min_workers: int | None = None
    stop_reason: Callable[[], str | None] = lambda: None


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

    A worker begins with the parameters of the servers, and leaves them when ``train`` has returned.
    An error in ``train`` reaches the other ranks, too.

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
    group = (transport or Transport()).process_group
    tiers = Tiers.detect(group.size(), num_workers, num_servers, replica_size)
    replica = new_replica_group(tiers, group.rank(), "gloo") if replica_size > 1 else None
    if tiers.role(group.rank()) is not Role.WORKER:
        serve(params, make_optimizer, tiers, group.rank(), transport=transport, serving=serving)
        return None
    remote = RemoteOptimizer(params, tiers.aggregators, transport=transport, replica_group=replica)
    remote.receive_weights()
    try:
        result = train(remote)
    except Exception as error:
        remote.fail(error)
        raise
    remote.leave()
    return result


def serve(
    params: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    tiers: Tiers,
    rank: int,
    *,
    transport: Transport | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Serve as a rank that does not train is meant to, until all workers have left.

    Args:
        params: As for a ``torch.optim`` optimizer, the same on all ranks.
        make_optimizer: Makes the optimizer of ``params``, if it is this rank's: any that needs no
            closure.
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
    transport, serving = transport or Transport(), serving or Serving()
    if tiers.role(rank) is Role.AGGREGATOR:
        groups = torch.optim.Optimizer(params, {}).param_groups
        return _Site(groups, tiers, rank, transport).average(serving)
    optimizer = make_optimizer(params)
    return _Site(optimizer.param_groups, tiers, rank, transport).make_steps(optimizer, serving)


class _Site:
    """A service rank's share of the parameters, with memory for it, and its connections.

    Args:
        groups: Parameter groups, in the workers' order.
        tiers: The roles of all ranks.
        rank: This one.
        transport: How the ranks are connected.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], tiers: Tiers, rank: int, transport: Transport
    ) -> None:
        self._run = transport.next_run()  # first: all ranks count as often, whatever error comes
        trainable, _ = trainable_parameters(groups)
        self._number = tiers.server(rank)
        self._shares = share_parameters([param for _, param in trainable], tiers.num_servers)
        self._params = [trainable[index][1] for index in self._shares[self._number]]
        self._tiers = tiers
        self._rank = rank
        self._transport = transport
        self._messages = transport.plan(self._params)
        self._accumulator = Accumulator(self._params, self._messages)
        self._meanwhile = Meanwhile(transport.timeout_s, transport.look_around)
        self._wires: list[Wire] = []

    def average(self, serving: Serving) -> dict[str, Any]:
        """Average the workers' gradients for the optimizer on another rank (3 tiers)."""
        wire = self._wire(self._tiers.optimizers[self._number], self._transport)
        self._meanwhile.reassure(wire.reassure_server)
        backend = RemoteBackend(wire, self._params, self._messages, self._accumulator)
        return self._serve(self._tiers.leaders, self._messages, backend, serving)

    def make_steps(self, optimizer: torch.optim.Optimizer, serving: Serving) -> dict[str, Any]:
        """Make the steps, with gradients of the workers (2 tiers) or of the aggregator (3)."""
        share_norms = None
        if self._tiers.num_servers > 1:
            share_norms = functools.partial(self._share_norms, self._other_optimizers())
        backend = LocalBackend(
            optimizer,
            self._params,
            self._messages,
            self._accumulator,
            serving.after_step,
            share_norms,
        )
        if self._tiers.role(self._rank) is Role.AGGREGATOR_OPTIMIZER:
            return self._serve(self._tiers.leaders, self._messages, backend, serving)
        dtype, alone = self._accumulator.dtype, serving._replace(min_workers=None)
        summed = [m if m.codec is not None else m._replace(dtype=dtype) for m in self._messages]
        aggregator = self._tiers.aggregators[self._number]
        return self._serve([aggregator], summed, backend, alone, are_heard=True)

    def _serve(
        self,
        ranks: Sequence[int],
        messages: Sequence[Message],
        backend: Backend,
        serving: Serving,
        are_heard: bool = False,
    ) -> dict[str, Any]:
        """Serve until all clients have left; returns what they said then.

        Args:
            ranks: Those of the clients.
            messages: How their gradients are cut.
            backend: What makes the steps.
            serving: What happens around the steps.
            are_heard: Whether the clients are servers, which ask for patience whenever they wait.
        """
        server = GradientServer(
            [self._wire(rank, self._transport) for rank in ranks],
            messages,
            self._accumulator,
            backend,
            model_checksum(self._params, self._messages),
            self._meanwhile,
            min_workers=serving.min_workers,
            are_heard=are_heard,
            stop_reason=serving.stop_reason,
        )
        try:
            return server.serve()
        finally:
            for wire in self._wires:
                wire.end()
            self._meanwhile.end()

    def _wire(self, rank: int, transport: Transport) -> Wire:
        """A connection to another rank; who waits for this one is reassured meanwhile."""
        wire = transport.wire(rank, self._tiers.name(rank), self._run, self._meanwhile)
        self._wires.append(wire)
        return wire

    def _other_optimizers(self) -> dict[int, Wire]:
        """Connections to the optimizers of the other shares, by share.

        Nobody reassures these ranks while another one loses its workers, one after another.
        """
        timeout_s, num_workers = self._transport.timeout_s, self._tiers.num_workers
        longest_s = None if timeout_s is None else (1 + num_workers) * timeout_s
        patient = dataclasses.replace(self._transport, timeout_s=longest_s)
        ranks = enumerate(self._tiers.optimizers)
        return {share: self._wire(rank, patient) for share, rank in ranks if share != self._number}

    def _share_norms(self, others: Mapping[int, Wire], norms: list[Tensor]) -> list[Tensor]:
        """Exchange norms of gradients with the other servers' optimizers; returns all, in order."""
        own = torch.stack(norms).double()
        sending = [(wire, wire.send(own, Lane.STATE)) for wire in others.values()]
        norm_of = dict(zip(self._shares[self._number], own, strict=True))
        for number, wire in others.items():
            theirs = torch.zeros(len(self._shares[number]), dtype=torch.float64)
            wire.wait(wire.receive(theirs, Lane.STATE), "the norms of gradients")
            norm_of.update(zip(self._shares[number], theirs, strict=True))
        for wire, work in sending:
            wire.wait(work, "the norms of gradients")
        return [norm_of[index].to(norms[0].dtype) for index in sorted(norm_of)]
