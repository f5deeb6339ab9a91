"""What a service rank has: its share of the parameters, memory for it, and connections."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.backends import Backend, LocalBackend
from lightning_loco.remote.gradient_server import GradientServer
from lightning_loco.remote.meanwhile import Meanwhile
from lightning_loco.remote.message import Message
from lightning_loco.remote.plan import (
    model_checksum,
    share_parameters,
    trainable_parameters,
)
from lightning_loco.remote.tiers import Tiers
from lightning_loco.remote.transport import Transport
from lightning_loco.remote.wire import Lane, Wire

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


class Site:
    """A service rank's share of the parameters, with memory for it.

    Args:
        params: All trainable parameters, in the workers' order.
        number: Which share is this rank's.
        tiers: The roles of all ranks.
        transport: How the ranks are connected.

    Attributes:
        params: This rank's share.
        shares: The numbers of the parameters of each share.
        number: As given.
        tiers: As given.
        transport: As given.
        messages: How the share is cut.
        accumulator: Memory for its gradients.
        meanwhile: What this rank does while it waits for another one.
    """

    def __init__(
        self, params: Sequence[Tensor], number: int, tiers: Tiers, transport: Transport
    ) -> None:
        self._run = transport.next_run()  # first: all ranks count as often, whatever error comes
        share = share_parameters(params, tiers.num_servers)
        self.shares = share
        self.params = [params[index] for index in share[number]]
        self.number = number
        self.tiers = tiers
        self.transport = transport
        self.messages = transport.plan(self.params)
        self.accumulator = Accumulator(self.params, self.messages)
        self.meanwhile = Meanwhile(transport.timeout_s, transport.look_around)
        self._wires: list[Wire] = []

    @classmethod
    def of(cls, groups: Any, tiers: Tiers, transport: Transport | None) -> Site:
        """What this rank has, of the parameters of an optimizer's groups."""
        trainable, _ = trainable_parameters(groups)
        transport = transport or Transport()
        group = transport.group
        rank = dist.get_rank() if group is None else group.rank()
        return cls([param for _, param in trainable], tiers.server(rank), tiers, transport)

    def workers(self) -> list[Wire]:
        """Connections to the ranks that speak for the workers."""
        return [self.wire(rank) for rank in self.tiers.leaders]

    def wire(self, rank: int) -> Wire:
        """A connection to another rank; who waits for this one is reassured meanwhile."""
        return self._wire(rank, self.transport)

    def _wire(self, rank: int, transport: Transport) -> Wire:
        wire = transport.wire(rank, self.tiers.name(rank), self._run, self.meanwhile)
        self._wires.append(wire)
        return wire

    def _other_optimizers(self) -> dict[int, Wire]:
        """Connections to the optimizers of the other shares, by share.

        Nobody reassures these ranks while another one loses its workers, one after another.
        """
        timeout_s, num_workers = self.transport.timeout_s, self.tiers.num_workers
        longest_s = None if timeout_s is None else (1 + num_workers) * timeout_s
        patient = dataclasses.replace(self.transport, timeout_s=longest_s)
        ranks = enumerate(self.tiers.optimizers)
        return {share: self._wire(rank, patient) for share, rank in ranks if share != self.number}

    def local_backend(self, optimizer: torch.optim.Optimizer, serving: Serving) -> LocalBackend:
        """Make the steps with an optimizer of this process."""
        share_norms = None
        if self.tiers.num_servers > 1:
            share_norms = functools.partial(self._share_norms, self._other_optimizers())
        return LocalBackend(
            optimizer,
            self.params,
            self.messages,
            self.accumulator,
            serving.before_step,
            serving.after_step,
            share_norms,
        )

    def serve(
        self,
        clients: Sequence[Wire],
        messages: Sequence[Message],
        backend: Backend,
        serving: Serving,
        are_heard: bool = False,
    ) -> dict[str, Any]:
        """Serve until all clients have left; returns what they said then.

        Args:
            clients: Who asks.
            messages: How their gradients are cut.
            backend: What makes the steps.
            serving: What happens around the steps.
            are_heard: Whether the clients are servers, which ask for patience whenever they wait.
        """
        server = GradientServer(
            clients,
            messages,
            self.accumulator,
            backend,
            model_checksum(self.params, self.messages),
            self.meanwhile,
            min_workers=serving.min_workers,
            are_heard=are_heard,
            stop_reason=serving.stop_reason,
        )
        try:
            return server.serve()
        finally:
            for wire in self._wires:
                wire.end()
            self.meanwhile.end()

    def _share_norms(self, others: Mapping[int, Wire], norms: list[Tensor]) -> list[Tensor]:
        """Exchange norms of gradients with the other servers' optimizers; returns all, in order."""
        own = torch.stack(norms).double()
        sending = [(wire, wire.send(own, Lane.STATE)) for wire in others.values()]
        norm_of = dict(zip(self.shares[self.number], own, strict=True))
        for number, wire in others.items():
            theirs = torch.zeros(len(self.shares[number]), dtype=torch.float64)
            wire.wait(wire.receive(theirs, Lane.STATE), "the norms of gradients")
            norm_of.update(zip(self.shares[number], theirs, strict=True))
        for wire, work in sending:
            wire.wait(work, "the norms of gradients")
        return [norm_of[index].to(norms[0].dtype) for index in sorted(norm_of)]
