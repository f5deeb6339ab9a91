"""Convergence of gossip: consensus rates, spectral gaps and condition numbers.

Notation: ``J`` is the matrix that maps to the mean, ``Lambda = laplacian_scale * (I - W)``. Uses
dense linear algebra on ``(N, N)``, for up to a few thousand workers, once before training.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_loco.topology.matchings import RandomTopology
from lightning_loco.topology.topology import TOLERANCE, Topology

if TYPE_CHECKING:
    from torch import Tensor


def consensus_rate(topology: Topology, num_workers: int) -> float:
    """Compute the asymptotic factor of the consensus distance per round ``x <- W x``.

    Fixed graph: ``|lambda_2(W)|``. Cycle of k matrices: ``||W_k ... W_1 - J||^(1/k)``. Random
    matchings: square root of the factor of the expected squared distance. 0 means the exact mean
    after one period; 1 means no convergence.

    Args:
        topology: A fixed, cyclic or random topology.
        num_workers: Number of workers N.

    Raises:
        ValueError: If the topology does not support N.

    Example:
        >>> from lightning_loco.topology import Ring
        >>> round(consensus_rate(Ring(), 8), 4)
        0.8047
    """
    topology.check_num_workers(num_workers)
    if num_workers == 1:
        return 0.0
    if isinstance(topology, RandomTopology):
        return math.sqrt(topology.moments(num_workers, 1 / topology.laplacian_scale)[1])
    period = cycle_length(topology, num_workers)
    import torch

    product = torch.eye(num_workers, dtype=torch.float64, device="cpu")
    for round_index in range(period):
        product = topology.mixing_matrix(num_workers, round_index) @ product
    rest = product - 1 / num_workers
    if period > 1:
        return math.pow(float(torch.linalg.matrix_norm(rest, ord=2)), 1 / period)
    return float(_eigenvalues(rest).abs().max())


def spectral_gap(topology: Topology, num_workers: int) -> float:
    """Compute ``1 - consensus_rate``: 1 for the exact mean, 0 for no mixing.

    Example:
        >>> from lightning_loco.topology import Complete
        >>> round(spectral_gap(Complete(), 8), 12)
        1.0
    """
    return 1 - consensus_rate(topology, num_workers)


def lambda_max(topology: Topology, num_workers: int) -> float:
    """Compute the largest eigenvalue that ``Lambda`` has in any round.

    Gossip without momentum is stable if ``gossip_step * lambda_max < 2``. For pairs it is 2. For
    directed graphs, whose eigenvalues are complex, it is ``max |lambda|^2 / Re(lambda)``, for which
    the same limit holds. 0 for a single worker.

    Example:
        >>> from lightning_loco.topology import Ring, Xor
        >>> round(lambda_max(Ring(), 8), 4), round(lambda_max(Xor(), 8), 4)
        (1.3333, 2.0)
    """
    topology.check_num_workers(num_workers)
    if num_workers == 1:
        return 0.0
    if isinstance(topology, RandomTopology):
        return topology.max_lambda
    rounds = range(cycle_length(topology, num_workers))
    modes = [
        mode
        for t in rounds
        for mode in laplacian_modes(topology, num_workers, t)
        if abs(mode) > 1e-9
    ]
    return max((abs(mode) ** 2 / mode.real for mode in modes), default=0.0)


def chi(topology: Topology, num_workers: int) -> float:
    """Compute the condition number of a fixed undirected graph.

    It is the ratio of the largest to the smallest positive eigenvalue of ``Lambda``. Plain gossip
    needs O(chi) rounds for a given accuracy, gossip with momentum O(sqrt(chi)). 1 for a complete
    graph and for a single worker.

    Raises:
        ValueError: If the graph changes from round to round, or is directed.

    Example:
        >>> from lightning_loco.topology import Ring
        >>> round(chi(Ring(), 8), 3)
        6.828
    """
    low, high = extreme_modes(topology, num_workers)
    return high / low


def cycle_length(topology: Topology, num_workers: int) -> int:
    """Return the period of a topology that is not random."""
    period = topology.period(num_workers)
    if period is None:
        raise ValueError(
            f"Topology '{topology.name}' is random, so its rate follows from expected values. "
            "Subclass RandomTopology and define moments() and max_lambda."
        )
    return period


def _eigenvalues(matrix: Tensor) -> Tensor:
    import torch

    symmetric = torch.allclose(matrix, matrix.T, rtol=0, atol=TOLERANCE)
    values: Tensor = (
        torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        if symmetric
        else torch.linalg.eigvals(matrix)
    )
    return values


def laplacian_modes(topology: Topology, num_workers: int, round_index: int) -> list[complex]:
    """Return the eigenvalues of ``Lambda`` without the zero that belongs to the mean."""
    mixing = _eigenvalues(topology.mixing_matrix(num_workers, round_index))
    modes = [topology.laplacian_scale * (1 - complex(value)) for value in mixing.tolist()]
    return sorted(modes, key=abs)[1:]


def extreme_modes(topology: Topology, num_workers: int) -> tuple[float, float]:
    """Return the smallest and largest positive eigenvalue of a fixed undirected graph."""
    topology.check(num_workers)
    if num_workers == 1:
        return 1.0, 1.0
    if topology.period(num_workers) != 1:
        raise ValueError(
            f"Topology '{topology.name}' changes from round to round and has no fixed spectrum. "
            "Use a fixed graph such as topology=ring, or choose gossip_step and momentum by hand."
        )
    modes = laplacian_modes(topology, num_workers, 0)
    if max(abs(mode.imag) for mode in modes) > TOLERANCE:
        raise ValueError(
            f"Topology '{topology.name}' is directed and its spectrum complex. "
            "Use an undirected one, such as topology=ring, or choose gossip_step and momentum "
            "by hand."
        )
    values = [mode.real for mode in modes]
    return min(values), max(values)
