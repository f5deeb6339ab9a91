"""Who does what: workers first, then the aggregator, then the optimizer."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Role(enum.Enum):
    """What a rank is for."""

    WORKER = "worker"
    AGGREGATOR = "aggregator"
    OPTIMIZER = "optimizer"
    AGGREGATOR_OPTIMIZER = "aggregator_optimizer"


class Tiers(NamedTuple):
    """Ranks 0 to ``num_workers - 1`` train and the others serve them.

    With one rank more (2 tiers) it averages the gradients and has the optimizer. With two more
    (3 tiers) the first averages, the aggregator, and the last one has the optimizer.

    Attributes:
        num_workers: Ranks that train.
        num_tiers: 2 or 3.

    Example:
        >>> tiers = Tiers.detect(world_size=6, num_workers=4)
        >>> tiers.num_tiers, tiers.role(0), tiers.role(4), tiers.role(5)
        (3, <Role.WORKER: 'worker'>, <Role.AGGREGATOR: 'aggregator'>, <Role.OPTIMIZER: 'optimizer'>)
    """

    num_workers: int
    num_tiers: int

    @classmethod
    def detect(cls, world_size: int, num_workers: int) -> Tiers:
        """Tell the tiers from the number of ranks.

        Raises:
            TypeError: If ``num_workers`` is not an integer.
            ValueError: If there are too few or too many ranks for it.
        """
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"num_workers must be an integer, got {num_workers!r}.")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}. Use 1 or more.")
        if world_size - num_workers not in (1, 2):
            raise ValueError(
                f"{num_workers} workers need {num_workers + 1} ranks (2 tiers: the last rank "
                f"averages and optimizes) or {num_workers + 2} (3 tiers: an aggregator and an "
                f"optimizer), got {world_size}. Start as many, or set num_workers="
                f"{max(world_size - 1, 1)} or {max(world_size - 2, 1)}."
            )
        return cls(num_workers, world_size - num_workers + 1)

    @property
    def aggregator(self) -> int:
        """The rank that the workers talk to."""
        return self.num_workers

    @property
    def optimizer(self) -> int:
        """The rank that has the optimizer; the aggregator's with 2 tiers."""
        return self.num_workers + self.num_tiers - 2

    def role(self, rank: int) -> Role:
        """What a rank is for."""
        if rank < self.num_workers:
            return Role.WORKER
        if self.num_tiers == 2:
            return Role.AGGREGATOR_OPTIMIZER
        return Role.AGGREGATOR if rank == self.aggregator else Role.OPTIMIZER
