"""Gossip with momentum: the optimal step and momentum of a graph, and the stability of settings.

Notation: ``Lambda = laplacian_scale * (I - W)``, ``A = I - gossip_step * Lambda``, ``J`` maps to
the mean. Two forms, without local steps:

- ``local``: ``x_{t+1} = A x_t + momentum (x_t - x_{t-1})``
- ``gossiped``: ``x_{t+1} = z_t + momentum (z_t - z_{t-1})`` with ``z_t = A x_t``
"""

from __future__ import annotations

import cmath
import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from lightning_loco.topology.matchings import RandomTopology
from lightning_loco.topology.spectral import cycle_length, extreme_modes, laplacian_modes
from lightning_loco.topology.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor

MomentumOn = Literal["local", "gossiped"]


class OptimalGossip(NamedTuple):
    """Step and momentum that reach consensus fastest, and their factor per round."""

    gossip_step: float
    momentum: float
    rate: float


def optimal_gossip(topology: Topology, num_workers: int) -> OptimalGossip:
    """Compute the gossip step and momentum that reach consensus fastest on a fixed graph.

    With the eigenvalues of ``Lambda`` on the disagreement in ``[mu, L]`` and ``chi = L / mu``::

        gossip_step = 4 / (sqrt(L) + sqrt(mu))^2
        momentum    = ((sqrt(chi) - 1) / (sqrt(chi) + 1))^2
        rate        = sqrt(momentum)

    For momentum on ``local``; training may need less momentum than this.

    Raises:
        ValueError: If the graph changes from round to round, or is directed.

    Source: Polyak (1964), the heavy-ball method, on ``x^T Lambda x / 2``.

    Example:
        >>> from lightning_loco.topology import Ring
        >>> [round(value, 3) for value in optimal_gossip(Ring(), 8)]
        [1.569, 0.199, 0.446]
    """
    low, high = extreme_modes(topology, num_workers)
    root = math.sqrt(high / low)
    rate = (root - 1) / (root + 1)
    return OptimalGossip(4 / (math.sqrt(high) + math.sqrt(low)) ** 2, rate**2, rate)


def gossip_radius(
    topology: Topology,
    num_workers: int,
    gossip_step: float,
    momentum: float,
    momentum_on: MomentumOn = "local",
) -> float:
    """Compute the asymptotic factor per round of the consensus distance under gossip with momentum.

    Gossip converges if it is below 1. For random topologies it is the square root of the factor of
    the expected squared distance.

    Args:
        topology: A fixed, cyclic or random topology.
        num_workers: Number of workers N.
        gossip_step: alpha, in units in which 0.5 averages pairs and 1.0 is one round of any other
            ``W``.
        momentum: gamma, in [0, 1).
        momentum_on: ``"local"`` or ``"gossiped"``.

    Raises:
        ValueError: If the topology does not support N, or ``momentum_on`` is unknown.

    Example:
        >>> from lightning_loco.topology import Ring
        >>> round(gossip_radius(Ring(), 16, 2.1, 0.454), 3)
        0.674
    """
    topology.check_num_workers(num_workers)
    if momentum_on not in get_args(MomentumOn):
        raise ValueError(f"momentum_on must be 'local' or 'gossiped', got {momentum_on!r}.")
    if num_workers == 1:
        return 0.0
    if isinstance(topology, RandomTopology):
        return math.sqrt(
            _mean_square_radius(*topology.moments(num_workers, gossip_step), momentum, momentum_on)
        )
    period = cycle_length(topology, num_workers)
    if period == 1:
        factors = (1 - gossip_step * mode for mode in laplacian_modes(topology, num_workers, 0))
        return max(_largest_root(factor, momentum, momentum_on) for factor in factors)
    import torch

    product = torch.eye(2 * num_workers, dtype=torch.float64, device="cpu")
    for round_index in range(period):
        product = (
            _momentum_step(topology, num_workers, round_index, gossip_step, momentum, momentum_on)
            @ product
        )
    return math.pow(float(torch.linalg.eigvals(product).abs().max()), 1 / period)


def _largest_root(factor: complex, momentum: float, momentum_on: MomentumOn) -> float:
    """Return the largest root of the recursion of a mode that gossip multiplies by ``factor``."""
    if momentum_on == "local":
        half, product = (factor + momentum) / 2, complex(momentum)
    else:
        half, product = (1 + momentum) * factor / 2, momentum * factor
    spread = cmath.sqrt(half * half - product)
    return max(abs(half + spread), abs(half - spread))


def _momentum_step(
    topology: Topology,
    num_workers: int,
    round_index: int,
    gossip_step: float,
    momentum: float,
    momentum_on: MomentumOn,
) -> Tensor:
    """Return a round as a matrix on ``[x_t, x_{t-1}]`` or ``[x_t, z_{t-1}]``, ``(2 N, 2 N)``.

    J is subtracted from ``A`` to remove the mode of the mean. Its remaining factor is at most
    sqrt(momentum) under ``local``, where no disagreement shrinks faster, and 0 under ``gossiped``.
    """
    import torch

    identity = torch.eye(num_workers, dtype=torch.float64, device="cpu")
    laplacian = topology.laplacian_scale * (
        identity - topology.mixing_matrix(num_workers, round_index)
    )
    mix = identity - gossip_step * laplacian - 1 / num_workers
    if momentum_on == "local":
        blocks = ((mix + momentum * identity, -momentum * identity), (identity, 0 * identity))
    else:
        blocks = (((1 + momentum) * mix, -momentum * identity), (mix, 0 * identity))
    return torch.cat([torch.cat(row, dim=1) for row in blocks])


def _mean_square_radius(
    first: float, second: float, momentum: float, momentum_on: MomentumOn
) -> float:
    """Return the radius of the recursion of the second moments ``(E|x|^2, E<x, y>, E|y|^2)``.

    ``E[A] = first`` and ``E[A^T A] = second`` on the disagreement, ``g`` is the momentum.

    local, y the previous x:      x' = A x + g (x - y),       y' = x
    gossiped, y the previous z:   x' = (1 + g) A x - g y,     y' = A x
    """
    import torch

    g = momentum
    if momentum_on == "local":
        rows = [
            [second + 2 * g * first + g * g, -2 * g * (first + g), g * g],
            [first + g, -g, 0.0],
            [1.0, 0.0, 0.0],
        ]
    else:
        lead = 1 + g
        rows = [
            [lead**2 * second, -2 * g * lead * first, g * g],
            [lead * second, -g * first, 0.0],
            [second, 0.0, 0.0],
        ]
    return float(
        torch.linalg.eigvals(torch.tensor(rows, dtype=torch.float64, device="cpu")).abs().max()
    )
