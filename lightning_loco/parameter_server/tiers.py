"""Who does what: training ranks first, then the aggregators, then the optimizers."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_LETTERS = 32


class Role(enum.Enum):
    """What a rank is for."""

    WORKER = "worker"
    AGGREGATOR = "aggregator"
    OPTIMIZER = "optimizer"
    AGGREGATOR_OPTIMIZER = "aggregator_optimizer"


class Tiers(NamedTuple):
    """The first ``W = num_workers * replica_size`` ranks train and the others serve them.

    With ``num_servers`` ranks more (2 tiers) each of these averages the gradients of its share of
    the parameters and has the optimizer for them. With twice as many (3 tiers) the first ones
    average, the aggregators, and the last ones have the optimizers.

    Attributes:
        num_workers: Workers, each of ``replica_size`` ranks.
        num_tiers: 2 or 3.
        num_servers: Shares of the parameters.
        replica_size: Ranks of one worker.

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
        """Tell the tiers from the number of ranks; no number of workers means 2 tiers.

        Raises:
            TypeError: If a number is not an integer.
            ValueError: If there are too few or too many ranks for it.
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
                + _fitting(world_size, num_servers, replica_size)
            )
        return cls(
            num_workers, (world_size - training) // num_servers + 1, num_servers, replica_size
        )

    @property
    def num_training(self) -> int:
        """Ranks that train: 0 to ``num_training - 1``."""
        return self.num_workers * self.replica_size

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_training + (self.num_tiers - 1) * self.num_servers

    @property
    def leaders(self) -> list[int]:
        """The rank of each worker that talks to the servers."""
        return list(range(0, self.num_training, self.replica_size))

    @property
    def aggregators(self) -> list[int]:
        """The rank of each server that the workers talk to."""
        return [self.num_training + server for server in range(self.num_servers)]

    @property
    def optimizers(self) -> list[int]:
        """The ranks that have the optimizers; the aggregators with 2 tiers."""
        return [rank + (self.num_tiers - 2) * self.num_servers for rank in self.aggregators]

    def server(self, rank: int) -> int:
        """Which share of the parameters a service rank has."""
        return (rank - self.num_training) % self.num_servers

    def role(self, rank: int) -> Role:
        """What a rank is for."""
        if rank < self.num_training:
            return Role.WORKER
        if self.num_tiers == 2:
            return Role.AGGREGATOR_OPTIMIZER
        return Role.AGGREGATOR if rank in self.aggregators else Role.OPTIMIZER

    def name(self, rank: int) -> str:
        """The rank in words, for messages."""
        if rank < self.num_training:
            worker, member = divmod(rank, self.replica_size)
            return f"worker {worker}" + (f" (rank {rank})" if self.replica_size > 1 else "")
        return f"the {self.role(rank).value.replace('_', '-')} (rank {rank})"

    def describe(self) -> str:
        """Who does what, in a few words."""
        servers = ", ".join(self.name(rank) for rank in range(self.num_training, self.world_size))
        return (
            f"{self.num_tiers} tiers, num_workers={self.num_workers}: ranks below "
            f"{self.num_training} train, {servers}"
        )


def check_ranks(
    num_workers: int | None, num_servers: int, replica_size: int, min_workers: int | None = None
) -> None:
    """Refuse numbers that no job can have.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If one is out of range.
    """
    for name, value in (
        ("num_workers", 1 if num_workers is None else num_workers),
        ("num_servers", num_servers),
        ("replica_size", replica_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}. Use 1 or more.")
    if min_workers is not None and not 1 <= min_workers <= (num_workers or min_workers):
        raise ValueError(
            f"min_workers must be 1 to num_workers={num_workers}, got {min_workers!r}."
        )
    if min_workers is not None and replica_size > 1:
        raise ValueError(
            "min_workers goes on without single ranks, so it needs replica_size=1, got "
            f"{replica_size}."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _fitting(world_size: int, num_servers: int, replica_size: int) -> str:
    counts = [(world_size - tiers * num_servers) / replica_size for tiers in (1, 2)]
    fitting = [str(int(count)) for count in counts if count >= 1 and count == int(count)]
    if not fitting:
        return f" (none fits {world_size} ranks)."
    return f"={' or '.join(fitting)}."


class ReplicaGroup:
    """Tells all ranks of a worker what its first rank has heard.

    Args:
        group: These ranks, with gloo; None for a worker of a single rank.

    Attributes:
        leads: Whether this rank is the one that talks to the servers.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.leads = group is None or dist.get_rank(group) == 0

    def let_go(self) -> None:
        """Keep the group no longer: nothing can be shared any more."""
        self._group = None

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank."""
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            dist.broadcast(tensor, source, group=self._group)

    def share_text(self, text: str | None) -> str | None:
        """The first rank's text, of which the first 32 bytes travel; None if it has none."""
        if self._group is None:
            return text
        letters = torch.zeros(_LETTERS, dtype=torch.uint8)
        for place, letter in enumerate((text or "").encode()[:_LETTERS]):
            letters[place] = letter
        self.share(letters)
        return bytes(letters.tolist()).rstrip(b"\0").decode() or None


def new_replica_group(
    tiers: Tiers, rank: int, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make the groups of all workers' ranks; call it on every rank of the default group.

    Args:
        tiers: The roles of all ranks.
        rank: This one.
        backend: Default: that of the default group.

    Returns:
        The group of this rank's worker; None for ranks that serve.
    """
    mine = None
    for first in tiers.leaders:
        ranks = list(range(first, first + tiers.replica_size))
        group = dist.new_group(ranks, backend=backend)
        if rank in ranks:
            mine = group
    return mine
