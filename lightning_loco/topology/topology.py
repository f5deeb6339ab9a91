"""The base class of all topologies: which workers exchange in a round, and with which weights.

The mixing matrix ``W`` of a round has one row per worker. ``W[i, j]`` is the share of worker
``j``'s message in what worker ``i`` receives, so one round of plain averaging is ``x <- W x``.
Every ``W`` here is doubly stochastic: rows and columns sum to 1, the mean over the workers never
moves, and repeated rounds bring all workers to it.

Gossip with a step size (GASLoC) uses the Laplacian ``Lambda = laplacian_scale * (I - W)`` and mixes
by ``x <- x - gossip_step * Lambda x``. The scale makes both conventions of the literature agree
with the same ``W``:

===============  ==============  ===================  ================================
topology         row of ``W``    ``laplacian_scale``  ``gossip_step`` that gives ``W``
===============  ==============  ===================  ================================
disjoint pairs   1/2 and 1/2     2.0                  0.5
everything else  Metropolis ...  1.0                  1.0
===============  ==============  ===================  ================================

So a pair has the Laplacian [[1, -1], [-1, 1]] with the eigenvalues 0 and 2, and averages at 0.5.
Graphs of your own may have the Laplacian of given edge weights: ``weighting="laplacian"``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import networkx as nx  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6
"""How far a sum may be from 1 and a matrix from symmetric: leaves room for float32 input."""


@dataclass(frozen=True)
class Topology(ABC):
    """The mixing matrix of each round, for any number of workers.

    Subclasses are small frozen dataclasses of settings: comparable, hashable and picklable. They
    must define ``weights`` and, unless the graph is fixed, ``period``.

    Example:
        >>> from lightning_loco.topology import Ring
        >>> Ring().weights(worker=0, num_workers=4)
        {0: 0.33333333333333337, 1: 0.3333333333333333, 3: 0.3333333333333333}
        >>> Ring().receivers(worker=0, num_workers=4)
        [1, 3]
    """

    name: ClassVar[str] = "custom"
    is_matching: ClassVar[bool] = False
    """Whether each round is a set of disjoint pairs that average with weights 1/2."""

    @property
    def laplacian_scale(self) -> float:
        """``Lambda = laplacian_scale * (I - W)``: 2.0 for pairs; 1.0 otherwise, unless given."""
        return 2.0 if self.is_matching else 1.0

    @abstractmethod
    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        """Return row ``worker`` of the round's mixing matrix: ``{j: W[worker, j]}``.

        It contains the worker itself and every other worker with a nonzero weight, in ascending
        order.

        Args:
            worker: Index in ``[0, num_workers)``.
            num_workers: Number of workers N.
            round_index: Index of the round, from 0.

        Raises:
            ValueError: If the topology does not support ``num_workers``, or an index is out of
                range.
        """

    def period(self, num_workers: int) -> int | None:
        """Return after how many rounds the matrices repeat: 1 if fixed, None if random."""
        return 1

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        """Return the other workers that need this one's message: ``W[j, worker] != 0``."""
        self.require(worker, num_workers, round_index)
        others = (j for j in range(num_workers) if j != worker)
        return [j for j in others if worker in self.weights(j, num_workers, round_index)]

    def mixing_matrix(self, num_workers: int, round_index: int = 0) -> Tensor:
        """Return the mixing matrix of a round, ``(N, N)`` float64."""
        import torch

        matrix = torch.zeros(num_workers, num_workers, dtype=torch.float64, device="cpu")
        for worker in range(num_workers):
            row = self.weights(worker, num_workers, round_index)
            matrix[worker, list(row)] = torch.tensor(
                list(row.values()), dtype=torch.float64, device="cpu"
            )
        return matrix

    def check_num_workers(self, num_workers: int) -> None:
        """Raise ValueError if this topology does not support this number of workers."""
        check_count(num_workers)

    def check(self, num_workers: int) -> None:
        """Check before training that gossip on this topology converges to the mean of all workers.

        Args:
            num_workers: Number of workers N.

        Raises:
            ValueError: If the topology does not support N, a mixing matrix of the period is not
                doubly stochastic, or the union of the graphs over one period is not connected.
        """
        self.check_num_workers(num_workers)
        period = self.period(num_workers)
        edges: set[tuple[int, int]] = set()
        for round_index in range(period or 1):
            rows = [self.weights(worker, num_workers, round_index) for worker in range(num_workers)]
            check_doubly_stochastic(f"Topology '{self.name}'", rows)
            edges.update((i, j) for i, row in enumerate(rows) for j in row)
        if period is not None:
            check_connected(f"Topology '{self.name}'", num_workers, edges)

    def require(self, worker: int, num_workers: int, round_index: int) -> None:
        """Raise ValueError if an argument of ``weights`` or ``receivers`` is out of range."""
        self.check_num_workers(num_workers)
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker must be in [0, {num_workers}), got {worker}.")
        if round_index < 0:
            raise ValueError(f"round_index counts rounds from 0, got {round_index}.")


def check_count(count: int, name: str = "num_workers") -> None:
    """Raise if ``count``, the argument called ``name``, is not an integer of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an int, got {count!r}.")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}.")


def check_power_of_two(name: str, num_workers: int, instead: str) -> None:
    """Raise if ``num_workers`` is not a power of two; ``instead`` names other topologies."""
    check_count(num_workers)
    if num_workers & (num_workers - 1):
        below = 1 << (num_workers.bit_length() - 1)
        raise ValueError(
            f"Topology '{name}' needs a power of two workers, got {num_workers}. "
            f"Use {instead}, or run {below} or {2 * below} workers."
        )


def check_doubly_stochastic(what: str, rows: Sequence[Mapping[int, float]]) -> None:
    """Raise if a row or column does not sum to 1 or a weight is not finite; ``what`` is a label."""
    columns = [0.0] * len(rows)
    for worker, row in enumerate(rows):
        if not all(map(math.isfinite, row.values())):
            raise ValueError(
                f"{what}: row {worker} of the mixing matrix holds a weight that is not finite."
            )
        total = math.fsum(row.values())
        if abs(total - 1) > TOLERANCE:
            raise ValueError(
                f"{what}: row {worker} of the mixing matrix sums to {total:.7g}, not to 1. "
                "Each worker's weights, its own included, must sum to 1; divide them by their sum "
                "or correct the diagonal."
            )
        for peer, weight in row.items():
            columns[peer] += weight
    for worker, total in enumerate(columns):
        if abs(total - 1) > TOLERANCE:
            raise ValueError(
                f"{what}: the mixing matrix is not doubly stochastic: column {worker} sums to "
                f"{total:.7g}, not to 1, so the mean over the workers would move. "
                "Give every worker the same total weight out as in, or use an undirected graph."
            )


def check_connected(what: str, num_workers: int, edges: Iterable[tuple[int, int]]) -> None:
    """Raise if the graph of ``edges`` on all workers is not connected; ``what`` is a label."""
    graph = nx.Graph(edges)
    graph.add_nodes_from(range(num_workers))
    parts = sorted(sorted(part) for part in nx.connected_components(graph))
    if len(parts) > 1:
        shown = [
            str(part) if len(part) <= 8 else f"[{part[0]}, {part[1]}, ... {len(part)} workers]"
            for part in parts[:4]
        ]
        raise ValueError(
            f"{what} is not connected: it falls into {len(parts)} parts, "
            f"{', '.join(shown)}{', ...' * (len(parts) > 4)}, "
            "which would never exchange. Add an edge between them."
        )
