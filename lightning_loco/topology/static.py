"""Fixed undirected graphs: ring, complete, star, torus, grid, hypercube.

A graph defines the neighbours of each worker. The weights follow from the degrees, so no worker
needs the whole matrix.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lightning_loco.topology.topology import Topology, check_count, check_power_of_two


@dataclass(frozen=True)
class FixedGraph(Topology):
    """A graph that is the same in every round, with Metropolis weights.

    ``W[i, j] = 1 / (1 + max(degree_i, degree_j))``, and the worker's own weight is 1 minus their
    sum. So ``W`` is symmetric, doubly stochastic and has a positive diagonal. A subclass must
    define ``neighbors``, and may define ``degree`` if counting neighbours is slow.

    Source: Xiao, Boyd and Kim (2007), "Distributed average consensus with least-mean-square
        deviation".
    """

    @abstractmethod
    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        """Return the other workers that share an edge with ``worker``, in ascending order."""

    def degree(self, worker: int, num_workers: int) -> int:
        """Return the number of neighbours of ``worker``."""
        return len(self.neighbors(worker, num_workers))

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        peers = self.neighbors(worker, num_workers)
        own = self.degree(worker, num_workers)
        row = {j: 1 / (1 + max(own, self.degree(j, num_workers))) for j in peers}
        row[worker] = 1 - math.fsum(row.values())
        return dict(sorted(row.items()))

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        self.require(worker, num_workers, round_index)
        return self.neighbors(worker, num_workers)


@dataclass(frozen=True)
class Ring(FixedGraph):
    """Each worker mixes with the one before and the one after it.

    Two messages per round for any number of workers. ``|lambda_2| = 1/3 + 2/3 cos(2 pi / N)``,
    which is slow for many workers.

    Example:
        >>> Ring().neighbors(0, 6)
        [1, 5]
    """

    name: ClassVar[str] = "ring"

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        return sorted({(worker - 1) % num_workers, (worker + 1) % num_workers} - {worker})


@dataclass(frozen=True)
class Complete(FixedGraph):
    """Each worker mixes with all others: one round gives the exact mean.

    Example:
        >>> Complete().weights(1, 4)
        {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    """

    name: ClassVar[str] = "complete"

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        return [j for j in range(num_workers) if j != worker]

    def degree(self, worker: int, num_workers: int) -> int:
        return num_workers - 1

    def check(self, num_workers: int) -> None:
        # Connected and doubly stochastic for every N, so the N * N weights need not be checked.
        self.check_num_workers(num_workers)


@dataclass(frozen=True)
class Star(FixedGraph):
    """Worker 0 mixes with all, the others only with worker 0. ``|lambda_2| = 1 - 1/N``.

    Example:
        >>> Star().neighbors(0, 4), Star().neighbors(2, 4)
        ([1, 2, 3], [0])
    """

    name: ClassVar[str] = "star"

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        return [0] if worker else list(range(1, num_workers))

    def degree(self, worker: int, num_workers: int) -> int:
        return 1 if worker else num_workers - 1


@dataclass(frozen=True)
class Grid(FixedGraph):
    """Workers on a rectangle, numbered row by row, mix with those above, below, left and right.

    Args:
        rows: Height of the rectangle; it must divide the number of workers. None takes the shape
            closest to a square (a single row if the number is prime).

    Example:
        >>> Grid().neighbors(4, 9), Grid().neighbors(0, 9)
        ([1, 3, 5, 7], [1, 3])
    """

    name: ClassVar[str] = "grid"
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_count(self.rows, "rows")

    def check_num_workers(self, num_workers: int) -> None:
        check_count(num_workers)
        if self.rows is not None and num_workers % self.rows:
            raise ValueError(
                f"Topology '{self.name}' with rows={self.rows} needs a multiple of {self.rows} "
                f"workers, got {num_workers}. "
                "Use rows=None for the squarest shape, or another number of workers."
            )

    def shape(self, num_workers: int) -> tuple[int, int]:
        """Return the rows and columns of the rectangle."""
        self.check_num_workers(num_workers)
        rows = self.rows or next(
            r for r in range(math.isqrt(num_workers), 0, -1) if num_workers % r == 0
        )
        return rows, num_workers // rows

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        rows, columns = self.shape(num_workers)
        row, column = divmod(worker, columns)
        around = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
        return [r * columns + c for r, c in around if 0 <= r < rows and 0 <= c < columns]


@dataclass(frozen=True)
class Torus(Grid):
    """A grid whose rows and columns are closed to rings: four neighbours for every worker.

    A square of side r has ``|lambda_2| = 3/5 + 2/5 cos(2 pi / r)``. A side of 2 gives one neighbour
    in that direction, a side of 1 none.

    Args:
        rows: Height of the rectangle, see `Grid`.

    Example:
        >>> Torus().neighbors(0, 9)
        [1, 2, 3, 6]
    """

    name: ClassVar[str] = "torus"

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        rows, columns = self.shape(num_workers)
        row, column = divmod(worker, columns)
        vertical = {(row + step) % rows * columns + column for step in (-1, 1)}
        horizontal = {row * columns + (column + step) % columns for step in (-1, 1)}
        return sorted((vertical | horizontal) - {worker})


@dataclass(frozen=True)
class Hypercube(FixedGraph):
    """Workers whose indices differ in one bit are neighbours: log2 N messages per round.

    Needs a power of two workers. ``|lambda_2| = 1 - 2 / (1 + log2 N)``.

    Example:
        >>> Hypercube().neighbors(5, 8)
        [1, 4, 7]
    """

    name: ClassVar[str] = "hypercube"

    def check_num_workers(self, num_workers: int) -> None:
        check_power_of_two(self.name, num_workers, "topology=ring or topology=exponential")

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        self.check_num_workers(num_workers)
        return sorted(worker ^ (1 << k) for k in range(num_workers.bit_length() - 1))
