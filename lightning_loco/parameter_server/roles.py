"""The roles of ranks, and the program of each role without Lightning: training, or a service.

The first ranks train, then come the aggregators, then the optimizers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.parameter_server.backends import Backend, LocalBackend, RemoteBackend
from lightning_loco.parameter_server.buckets import (
    Accumulator,
    ParamBucket,
    model_checksum,
    shard_parameters,
    trainable_parameters,
)
from lightning_loco.parameter_server.gradient_server import GradientServer
from lightning_loco.parameter_server.keep_alive import KeepAlive
from lightning_loco.parameter_server.optimizer import RemoteOptimizer
from lightning_loco.parameter_server.protocol import (
    MessageKind,
    MessageTag,
    RankConnection,
    Transport,
)

T = TypeVar("T")


class Serving(NamedTuple):
    """How a service rank serves.

    Attributes:
        after_step: Called where the optimizer is after each step, to step a schedule for instance.
        stop_reason: Returns why all should stop after a step, if this rank was asked to.
    """

    after_step: Callable[[], object] | None = None
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
    """Train or serve, depending on this rank's role; call it on all ranks of the process group.

    A worker starts with the servers' parameters, and leaves the servers when ``train`` returns. An
    error in ``train`` is sent to the other ranks.

    Args:
        train: The workers' training loop; called with the :class:`RemoteOptimizer`.
        params: As for a ``torch.optim`` optimizer, the same on all ranks.
        make_optimizer: Makes the optimizer of ``params``; called where it is needed.
        num_workers: Number of workers. The ranks after them serve; their number determines the
            number of tiers.
        num_servers: Shards of the parameters, each with its own service ranks.
        replica_size: Ranks per worker.
        transport: How the ranks are connected.
        serving: How service ranks serve.

    Returns:
        What ``train`` has returned; None on service ranks.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If the number of ranks does not match, or the models differ.
        RuntimeError: If another rank has ended or timed out.

    Example::

        run_role(train, model.parameters(), torch.optim.AdamW, num_workers=4)  # on 5 or 6 ranks
    """
    group = (transport or Transport()).process_group
    tiers = Tiers.detect(group.size(), num_workers, num_servers, replica_size)
    replica = tiers.new_replica_group(group.rank(), "gloo") if replica_size > 1 else None
    if tiers.role(group.rank()) is not Role.WORKER:
        serve(params, make_optimizer, tiers, group.rank(), transport=transport, serving=serving)
        return None
    remote = RemoteOptimizer(params, tiers.aggregators, transport=transport, replica_group=replica)
    remote.receive_weights()
    try:
        result = train(remote)
    except Exception as error:
        remote.fail(error)  # else the others would wait for this rank until their timeout
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
    """Serve as the role of this service rank says, until all workers have left.

    Args:
        params: As for a ``torch.optim`` optimizer, the same on all ranks.
        make_optimizer: Makes the optimizer of ``params``, if this rank has it: any that needs no
            closure.
        tiers: The roles of all ranks.
        rank: This rank.
        transport: How the ranks are connected, as on the workers.
        serving: How this rank serves.

    Returns:
        The final values that a worker has sent when it left.

    Raises:
        ValueError: If a worker has another model.
        RuntimeError: If another rank has ended or timed out.
    """
    transport, serving = transport or Transport(), serving or Serving()
    if tiers.role(rank) is Role.AGGREGATOR:
        groups = torch.optim.Optimizer(params, {}).param_groups
        return _ServiceRank(groups, tiers, rank, transport).aggregate(serving)
    optimizer = make_optimizer(params)
    return _ServiceRank(optimizer.param_groups, tiers, rank, transport).optimize(optimizer, serving)


class _ServiceRank:
    """A service rank's shard of the parameters, the memory for it, and its connections."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], tiers: Tiers, rank: int, transport: Transport
    ) -> None:
        self._run = transport.next_run()  # before any error, so that all ranks have the same count
        trainable, _ = trainable_parameters(groups)
        self._shard = tiers.shard(rank)
        self._shards = shard_parameters([param for _, param in trainable], tiers.num_servers)
        self._params = [trainable[index][1] for index in self._shards[self._shard]]
        self._tiers = tiers
        self._rank = rank
        self._transport = transport
        self._buckets = transport.plan_buckets(self._params)
        self._accumulator = Accumulator(self._params, self._buckets)
        self._keep_alive = KeepAlive(transport.timeout_s, transport.raise_if_failed)
        self._connections: list[RankConnection] = []

    def aggregate(self, serving: Serving) -> dict[str, Any]:
        """Average the workers' gradients for the optimizer on another rank (3 tiers)."""
        connection = self._connect(self._tiers.optimizers[self._shard], self._transport)
        send = functools.partial(connection.try_send, MessageKind.KEEP_ALIVE, {})
        self._keep_alive.senders.append(send)
        backend = RemoteBackend(connection, self._params, self._buckets, self._accumulator)
        return self._serve(self._tiers.leaders, self._buckets, backend, serving)

    def optimize(self, optimizer: torch.optim.Optimizer, serving: Serving) -> dict[str, Any]:
        """Take the steps, with gradients of the workers (2 tiers) or of the aggregator (3)."""
        exchange_norms = None
        if self._tiers.num_servers > 1:
            exchange_norms = functools.partial(self._exchange_norms, self._other_optimizers())
        backend = LocalBackend(
            optimizer,
            self._params,
            self._buckets,
            self._accumulator,
            serving.after_step,
            exchange_norms,
        )
        if self._tiers.role(self._rank) is Role.AGGREGATOR_OPTIMIZER:
            return self._serve(self._tiers.leaders, self._buckets, backend, serving)
        dtype = self._accumulator.dtype
        # Without a codec the aggregator sends its mean in the dtype of the sum.
        summed = [b if b.codec is not None else b._replace(dtype=dtype) for b in self._buckets]
        aggregator = self._tiers.aggregators[self._shard]
        return self._serve([aggregator], summed, backend, serving, clients_send_keep_alives=True)

    def _serve(
        self,
        ranks: Sequence[int],
        buckets: Sequence[ParamBucket],
        backend: Backend,
        serving: Serving,
        clients_send_keep_alives: bool = False,
    ) -> dict[str, Any]:
        """Serve until all clients have left; return the final values of one.

        They send gradients in ``buckets``, and keep-alives whenever they wait if they are servers.
        """
        server = GradientServer(
            [self._connect(rank, self._transport) for rank in ranks],
            buckets,
            self._accumulator,
            backend,
            model_checksum(self._params, self._buckets),
            self._keep_alive,
            clients_send_keep_alives=clients_send_keep_alives,
            stop_reason=serving.stop_reason,
        )
        try:
            return server.serve()
        finally:
            for connection in self._connections:
                connection.close()
            self._keep_alive.close()

    def _connect(self, rank: int, transport: Transport) -> RankConnection:
        """Return a connection to another rank; keep-alives are sent while it is waited for."""
        name = self._tiers.name(rank)
        connection = transport.connect(rank, name, self._run, self._keep_alive)
        self._connections.append(connection)
        return connection

    def _other_optimizers(self) -> dict[int, RankConnection]:
        """Return connections to the optimizers of the other shards, by shard.

        These ranks send no keep-alives to each other, so the timeout is that for all workers to
        be late one after another.
        """
        timeout_s, num_workers = self._transport.timeout_s, self._tiers.num_workers
        longest_s = None if timeout_s is None else (1 + num_workers) * timeout_s
        transport = dataclasses.replace(self._transport, timeout_s=longest_s)
        ranks = enumerate(self._tiers.optimizers)
        return {
            shard: self._connect(rank, transport) for shard, rank in ranks if shard != self._shard
        }

    def _exchange_norms(
        self, others: Mapping[int, RankConnection], norms: list[Tensor]
    ) -> list[Tensor]:
        """Exchange norms of gradients with the other servers' optimizers; return all, in order."""
        own = torch.stack(norms).double()
        # All sends first: two ranks that each wait for the other's norms would wait forever.
        sends = [(other, other.send(own, MessageTag.STATE)) for other in others.values()]
        norm_of = dict(zip(self._shards[self._shard], own, strict=True))
        for shard, other in others.items():
            received = torch.zeros(len(self._shards[shard]), dtype=torch.float64, device="cpu")
            other.wait(other.receive(received, MessageTag.STATE), "the norms of gradients")
            norm_of.update(zip(self._shards[shard], received, strict=True))
        for other, work in sends:
            other.wait(work, "the norms of gradients")
        return [norm_of[index].to(norms[0].dtype) for index in sorted(norm_of)]


class Role(enum.Enum):
    """The role of a rank."""

    WORKER = "worker"
    AGGREGATOR = "aggregator"
    OPTIMIZER = "optimizer"
    AGGREGATOR_OPTIMIZER = "aggregator_optimizer"


class Tiers(NamedTuple):
    """The roles of all ranks: the first ``W = num_workers * replica_size`` train, others serve.

    With ``num_servers`` more ranks (2 tiers) each of these averages the gradients of its shard of
    the parameters and has the optimizer for it. With twice as many (3 tiers) the first of them, the
    aggregators, average, and the last ones have the optimizers.

    Attributes:
        num_workers: Number of workers, each of ``replica_size`` ranks.
        num_tiers: 2 or 3.
        num_servers: Number of shards of the parameters.
        replica_size: Ranks per worker.

    Example:
        >>> tiers = Tiers.detect(world_size=6, num_workers=4)
        >>> tiers.num_tiers, tiers.role(0), tiers.role(4), tiers.role(5)
        (3, <Role.WORKER: 'worker'>, <Role.AGGREGATOR: 'aggregator'>, <Role.OPTIMIZER: 'optimizer'>)
    """

    num_workers: int
    num_tiers: int
    num_servers: int = 1
    replica_size: int = 1

    @classmethod
    def detect(
        cls,
        world_size: int,
        num_workers: int | None,
        num_servers: int = 1,
        replica_size: int = 1,
    ) -> Tiers:
        """Determine the tiers from the number of ranks; without ``num_workers``, 2 tiers.

        TypeError if a number is not an integer; ValueError if there are too few or too many ranks.
        """
        check_ranks(num_workers, num_servers, replica_size)
        if num_workers is None:
            num_workers = max((world_size - num_servers) // replica_size, 1)
        training = num_workers * replica_size
        if world_size not in (training + num_servers, training + 2 * num_servers):
            raise ValueError(
                f"{_count(num_workers, 'worker')}"
                + (f" of {replica_size} ranks" if replica_size > 1 else "")
                + (f" and {num_servers} servers" if num_servers > 1 else "")
                + f" need {training + num_servers} ranks (2 tiers: a server averages and "
                f"optimizes) or {training + 2 * num_servers} (3 tiers: an aggregator and an "
                f"optimizer), got {world_size}. Start as many, or set num_workers"
                + _matching_counts(world_size, num_servers, replica_size)
            )
        return cls(
            num_workers, (world_size - training) // num_servers + 1, num_servers, replica_size
        )

    @property
    def num_training(self) -> int:
        """Number of ranks that train: 0 to ``num_training - 1``."""
        return self.num_workers * self.replica_size

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.num_training + (self.num_tiers - 1) * self.num_servers

    @property
    def leaders(self) -> list[int]:
        """The rank of each worker that is a client of the servers."""
        return list(range(0, self.num_training, self.replica_size))

    @property
    def aggregators(self) -> list[int]:
        """The ranks of the servers that the workers are clients of."""
        return [self.num_training + server for server in range(self.num_servers)]

    @property
    def optimizers(self) -> list[int]:
        """The ranks that have the optimizers; with 2 tiers, the aggregators."""
        return [rank + (self.num_tiers - 2) * self.num_servers for rank in self.aggregators]

    def shard(self, rank: int) -> int:
        """Return the number of a service rank's shard of the parameters."""
        return (rank - self.num_training) % self.num_servers

    def role(self, rank: int) -> Role:
        """Return the role of a rank."""
        if rank < self.num_training:
            return Role.WORKER
        if self.num_tiers == 2:
            return Role.AGGREGATOR_OPTIMIZER
        return Role.AGGREGATOR if rank in self.aggregators else Role.OPTIMIZER

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages."""
        if rank < self.num_training:
            worker = rank // self.replica_size
            return f"worker {worker}" + (f" (rank {rank})" if self.replica_size > 1 else "")
        return f"the {self.role(rank).value.replace('_', '-')} (rank {rank})"

    def describe(self) -> str:
        """Return a short description of all roles.

        Example:
            >>> Tiers(num_workers=1, num_tiers=2).describe().partition(": ")[2]
            'rank 0 trains, rank 1 is the aggregator-optimizer'
        """
        servers = ", ".join(
            f"rank {rank} is the {self.role(rank).value.replace('_', '-')}"
            for rank in range(self.num_training, self.world_size)
        )
        kinds = ["aggregator rank", "optimizer rank"][3 - self.num_tiers :]
        counts = [_count(self.num_training, "training rank")]
        counts += [_count(self.num_servers, kind) for kind in kinds]
        last = self.num_training
        train = f"ranks below {last} train" if last > 1 else "rank 0 trains"
        return f"{', '.join(counts)} ({self.num_tiers} tiers): {train}, {servers}"

    def new_replica_group(self, rank: int, backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a process group for each worker; call it on every rank of the default group.

        Returns the group of this rank's worker; None for service ranks.
        """
        own_group = None
        for first in self.leaders:
            ranks = list(range(first, first + self.replica_size))
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                own_group = group
        return own_group


def check_ranks(num_workers: int | None, num_servers: int, replica_size: int) -> None:
    """Raise TypeError or ValueError for numbers of workers and servers that are never valid."""
    for name, value in (
        ("num_workers", 1 if num_workers is None else num_workers),
        ("num_servers", num_servers),
        ("replica_size", replica_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}. Use 1 or more.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _matching_counts(world_size: int, num_servers: int, replica_size: int) -> str:
    counts = [(world_size - tiers * num_servers) / replica_size for tiers in (1, 2)]
    matching = [str(int(count)) for count in counts if count >= 1 and count == int(count)]
    if not matching:
        return f" (none matches {world_size} ranks)."
    return f"={' or '.join(matching)}."
