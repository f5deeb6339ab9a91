"""Directed exponential graphs: worker i sends to i + 1, i + 2, i + 4, ... (modulo N).

They are not symmetric but circulant, so the mixing matrix is doubly stochastic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_loco.topology.topology import Topology


def _num_shifts(num_workers: int) -> int:
    """Return ``ceil(log2 N)``, computed with integers."""
    return (num_workers - 1).bit_length()


@dataclass(frozen=True)
class Exponential(Topology):
    """Worker i sends to i + 1, i + 2, i + 4, ... (modulo N) in every round, all weights equal.

    ``W[i, i - 2^k] = W[i, i] = 1 / (tau + 1)`` with ``tau = ceil(log2 N)``; ``|lambda_2| = 1 - 2 /
    (tau + 1)`` for even N. Converges much faster than a ring, for log2 N messages a round.

    Source: Assran et al. (2019), "Stochastic gradient push"; Ying et al. (2021), "Exponential graph
        is provably efficient".

    Example:
        >>> Exponential().weights(0, 8)
        {0: 0.25, 4: 0.25, 6: 0.25, 7: 0.25}
        >>> Exponential().receivers(0, 8)
        [1, 2, 4]
    """

    name: ClassVar[str] = "exponential"

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        tau = _num_shifts(num_workers)
        senders = sorted({worker} | {(worker - (1 << k)) % num_workers for k in range(tau)})
        return dict.fromkeys(senders, 1 / (tau + 1))

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        self.require(worker, num_workers, round_index)
        return sorted((worker + (1 << k)) % num_workers for k in range(_num_shifts(num_workers)))


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """The exponential graph one edge at a time: i sends to i + 2^k, ``k = t mod ceil(log2 N)``.

    ``W[i, i] = W[i, i - 2^k] = 1/2``: one message out and one in. A period of rounds gives the
    exact mean if and only if N is a power of two; for other N a part of the distance remains (0.217
    for 6 workers, 0.209 for 12).

    Source: Ying et al. (2021), "Exponential graph is provably efficient for decentralized deep
        training".

    Example:
        >>> OnePeerExponential().weights(0, 8, round_index=1)
        {0: 0.5, 6: 0.5}
        >>> OnePeerExponential().receivers(0, 8, round_index=1)
        [2]
    """

    name: ClassVar[str] = "one_peer_exponential"

    def period(self, num_workers: int) -> int:
        return max(1, _num_shifts(num_workers))

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        if num_workers == 1:
            return {0: 1.0}
        sender = (worker - self._shift(num_workers, round_index)) % num_workers
        return dict.fromkeys(sorted((worker, sender)), 0.5)

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        self.require(worker, num_workers, round_index)
        if num_workers == 1:
            return []
        return [(worker + self._shift(num_workers, round_index)) % num_workers]

    def _shift(self, num_workers: int, round_index: int) -> int:
        return 1 << (round_index % self.period(num_workers))
