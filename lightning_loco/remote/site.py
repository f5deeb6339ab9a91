"""What a service rank has: its share of the parameters, memory for it, and connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.backend import Backend
from lightning_loco.remote.gradient_server import GradientServer
from lightning_loco.remote.local_backend import LocalBackend
from lightning_loco.remote.plan import (
    Message,
    model_checksum,
    plan_messages,
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
    """

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
    def of(cls, groups: Any, tiers: Tiers, transport: Transport | None) -> Site:
        """What this rank has, of the parameters of an optimizer's groups."""
        trainable, _ = trainable_parameters(groups)
        transport = transport or Transport()
        group = transport.group
        rank = dist.get_rank() if group is None else group.rank()
        return cls([param for _, param in trainable], tiers.server(rank), tiers, transport)

    def workers(self) -> list[Wire]:
        """Connections to the ranks that speak for the workers."""
        return [self.transport.wire(rank, self.tiers.name(rank)) for rank in self.tiers.leaders]

    def local_backend(self, optimizer: torch.optim.Optimizer, serving: Serving) -> LocalBackend:
        """Make the steps with an optimizer of this process."""
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
        patience: float = 1.0,
    ) -> dict[str, Any]:
        """Serve until all clients have left; returns what they said then.

        A client may be ``patience`` times as late as ``timeout_s`` says: one that waits for clients
        of its own must be.
        """
        timeout_s = self.transport.timeout_s
        server = GradientServer(
            clients,
            messages,
            self.accumulator,
            backend,
            model_checksum(self.params, self.messages),
            timeout_s=None if timeout_s is None else patience * timeout_s,
            min_workers=serving.min_workers,
            stop_reason=serving.stop_reason,
            look_around=self.transport.look_around,
        )
        return server.serve()

    def _share_norms(self, norms: list[Tensor]) -> list[Tensor]:
        """Exchange norms of gradients with the other servers' optimizers; returns all, in order."""
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
