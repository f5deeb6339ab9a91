"""Topologies of disjoint pairs: XOR partners, and random pairs that are equal on all workers."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lightning_loco.topology.topology import Topology, check_power_of_two


@dataclass(frozen=True)
class Matching(Topology):
    """Disjoint pairs in each round, which average with weights 1/2; a worker without partner idles.

    A subclass must define ``partner``.
    """

    is_matching: ClassVar[bool] = True

    @abstractmethod
    def partner(self, worker: int, num_workers: int, round_index: int = 0) -> int:
        """Return the worker that ``worker`` averages with in this round; itself if it idles."""

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        partner = self.partner(worker, num_workers, round_index)
        return {worker: 1.0} if partner == worker else dict.fromkeys(sorted((worker, partner)), 0.5)

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        self.require(worker, num_workers, round_index)
        partner = self.partner(worker, num_workers, round_index)
        return [] if partner == worker else [partner]


@dataclass(frozen=True)
class Xor(Matching):
    """In round t worker i averages with ``i XOR 2^k``, ``k = t mod log2 N``.

    Needs a power of two workers. Gives the exact mean after log2 N rounds, with one message out and
    one in per round. With GASLoC use ``gossip_step=0.5``.

    Example:
        >>> [Xor().partner(5, 8, t) for t in range(4)]
        [4, 7, 1, 4]
    """

    name: ClassVar[str] = "xor"

    def check_num_workers(self, num_workers: int) -> None:
        check_power_of_two(
            self.name, num_workers, "topology=one_peer_exponential or topology=random_matching"
        )

    def period(self, num_workers: int) -> int:
        self.check_num_workers(num_workers)
        return max(1, num_workers.bit_length() - 1)

    def partner(self, worker: int, num_workers: int, round_index: int = 0) -> int:
        shift = 1 << (round_index % self.period(num_workers))
        return worker ^ shift if num_workers > 1 else worker


@dataclass(frozen=True)
class RandomTopology(Topology):
    """Mixing matrices drawn in each round from ``(seed, round_index)``, the same on every worker.

    Args:
        seed: Any integer; all workers must use the same one.

    Raises:
        TypeError: If ``seed`` is not an integer.
    """

    seed: int = 0
    max_lambda: ClassVar[float]
    """Largest eigenvalue that ``Lambda`` can have in any round, for two workers or more."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}.")

    def period(self, num_workers: int) -> None:
        return None

    @abstractmethod
    def moments(self, num_workers: int, gossip_step: float) -> tuple[float, float]:
        """Return the first and second moment of ``A = I - gossip_step * Lambda``, N at least 2.

        For x of mean zero ``E[A x] = first * x`` and ``E[|A x|^2] = second * |x|^2``.
        """


@dataclass(frozen=True)
class RandomMatching(Matching, RandomTopology):
    """A new random perfect matching in each round; with an odd number one worker idles.

    The mean square distance to the mean shrinks by ``(N - 2) / (2 (N - 1))`` per round for even N
    and by ``1/2`` for odd N. Hardly any graph mixes better for one message per round.

    Args:
        seed: Any integer; all workers must use the same one.

    Example:
        >>> matching = RandomMatching(seed=1)
        >>> peer = matching.partner(3, 8, round_index=5)
        >>> matching.partner(peer, 8, round_index=5)
        3
    """

    name: ClassVar[str] = "random_matching"
    max_lambda: ClassVar[float] = 2.0

    def partner(self, worker: int, num_workers: int, round_index: int = 0) -> int:
        return _draw(self.seed, round_index, 0, num_workers)[worker]

    def moments(self, num_workers: int, gossip_step: float) -> tuple[float, float]:
        spread = _mean_laplacian(num_workers)
        return 1 - gossip_step * spread, 1 - 2 * gossip_step * (1 - gossip_step) * spread


@dataclass(frozen=True)
class RandomTwoPeer(RandomTopology):
    """Two independent random matchings at once: weight 1/3 for the worker and for each peer.

    ``W = I - (L1 + L2) / 3``, where ``L1`` and ``L2`` are the pair Laplacians ([[1, -1], [-1, 1]]
    on each pair). If both matchings draw the same pair, the weight of the peer is 2/3; a worker
    that idles in one of them keeps that third. Two messages per round in each direction.

    Args:
        seed: Any integer; all workers must use the same one.

    Example:
        >>> sorted(RandomTwoPeer(seed=0).weights(0, 8).values())
        [0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
    """

    name: ClassVar[str] = "random_two_peer"
    max_lambda: ClassVar[float] = 4 / 3

    def peers(self, worker: int, num_workers: int, round_index: int = 0) -> tuple[int, int]:
        """Return the partners of ``worker`` in the two matchings; itself where it idles."""
        first, second = (_draw(self.seed, round_index, stream, num_workers) for stream in (0, 1))
        return first[worker], second[worker]

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> dict[int, float]:
        self.require(worker, num_workers, round_index)
        shares = [worker, *self.peers(worker, num_workers, round_index)]
        return {j: shares.count(j) / 3 for j in sorted(set(shares))}

    def receivers(self, worker: int, num_workers: int, round_index: int = 0) -> list[int]:
        self.require(worker, num_workers, round_index)
        return sorted(set(self.peers(worker, num_workers, round_index)) - {worker})

    def moments(self, num_workers: int, gossip_step: float) -> tuple[float, float]:
        # L^2 = 2 L for each matching, and the two are independent: E[L1 L2] = E[L]^2.
        share, spread = gossip_step / 3, _mean_laplacian(num_workers)
        first = 1 - 2 * share * spread
        second = 1 - 4 * share * spread + share**2 * (4 * spread + 2 * spread**2)
        return first, second


def _mean_laplacian(num_workers: int) -> float:
    """Return l in ``E[L] = l (I - J)`` for one uniform matching of at least two workers."""
    return 1.0 if num_workers % 2 else num_workers / (num_workers - 1)


@lru_cache(maxsize=16)
def _draw(seed: int, round_index: int, stream: int, num_workers: int) -> tuple[int, ...]:
    """Return the partner of every worker in one round.

    Workers on different hosts must draw the same pairs, so this uses only ``Random.random`` seeded
    with a string: Python guarantees the same numbers in every version and process for it, but not
    for ``shuffle``.
    """
    uniform = random.Random(f"{seed}/{round_index}/{stream}").random
    order = list(range(num_workers))
    for last in range(num_workers - 1, 0, -1):
        chosen = int(uniform() * (last + 1))
        order[last], order[chosen] = order[chosen], order[last]
    partners = list(range(num_workers))
    for i, j in zip(order[::2], order[1::2], strict=False):
        partners[i], partners[j] = j, i
    return tuple(partners)
