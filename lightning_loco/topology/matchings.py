"""Rounds of disjoint pairs: XOR partners, and random pairs that all workers draw alike."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lightning_loco.topology.base import Topology, check_power_of_two


@dataclass(frozen=True)
class Matching(Topology):
    """Each round is a set of disjoint pairs that average at 1/2; a worker without partner idles.

    A subclass defines ``partner``.
    """

    is_matching: ClassVar[bool] = True
    laplacian_scale: ClassVar[float] = 2.0

    @abstractmethod
    def partner(self, worker: int, num_workers: int, round_index: int = 0) -> int:
        """The worker that ``worker`` averages with in this round; itself when it idles."""

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

    Needs a power of two workers and gives the exact mean after log2 N rounds with one message out
    and one in each. With GASLoC it takes ``gossip_step=0.5``.

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
        seed: any whole number; all workers must use the same one.

    Raises:
        TypeError: ``seed`` is not an int.
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
        """First and second moment of ``A = I - gossip_step * Lambda`` among at least two workers.

        For x of mean zero ``E[A x] = first * x`` and ``E[|A x|^2] = second * |x|^2``.
        """


@dataclass(frozen=True)
class RandomMatching(Matching, RandomTopology):
    """Each round a fresh, uniformly drawn perfect matching; of an odd number one worker idles.

    The mean square distance to the mean shrinks by ``(N - 2) / (2 (N - 1))`` a round for even N and
    by ``1/2`` for odd N, whatever the number of workers: hardly any graph mixes better for one
    message a round.

    Args:
        seed: any whole number; all workers must use the same one.

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
    """Two independent random matchings at once: a third each for oneself and the two peers.

    ``W = I - (L1 + L2) / 3``, where ``L1`` and ``L2`` are the pair Laplacians ([[1, -1], [-1, 1]]
    on each pair). Where both matchings draw the same pair, the peer weighs 2/3; a worker that idles
    in one of them keeps that third. Two messages a round in each direction.

    Args:
        seed: any whole number; all workers must use the same one.

    Example:
        >>> sorted(RandomTwoPeer(seed=0).weights(0, 8).values())
        [0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
    """

    name: ClassVar[str] = "random_two_peer"
    max_lambda: ClassVar[float] = 4 / 3

    def peers(self, worker: int, num_workers: int, round_index: int = 0) -> tuple[int, int]:
        """The partners of ``worker`` in the two matchings; itself where it idles."""
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
    """The factor l in ``E[L] = l (I - J)`` for one uniform matching of at least two workers."""
    return 1.0 if num_workers % 2 else num_workers / (num_workers - 1)


@lru_cache(maxsize=16)
def _draw(seed: int, round_index: int, stream: int, num_workers: int) -> tuple[int, ...]:
    """The partner of every worker in one round.

    Uses only ``Random.random`` after seeding with a text: Python promises the same numbers for
    these in every version and process, which it does not for ``shuffle``. Workers on different
    machines have to draw the same pairs.
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
