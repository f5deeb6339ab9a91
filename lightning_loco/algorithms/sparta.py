"""SPARTA: in each round the workers average a small random part of their parameters."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State

_MASK = 2**31 - 1
_HASH_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
_Integers = TypeVar("_Integers", int, Tensor)


@dataclasses.dataclass(frozen=True)
class SPARTA(Algorithm):
    r"""Averages a random part of the parameters in each round, the same part on all workers.

    .. math::
        \theta^i_k \leftarrow \frac{1}{N} \sum_j \theta^j_k \quad \text{for } k \in S_t

    The set :math:`S_t` has one element of each stretch of :math:`1/p` neighbouring parameters,
    drawn anew in each round; the last stretch may be shorter. So every parameter is averaged with
    probability p in a round, the message has that share of the parameters, and nothing but the seed
    is needed to draw the same set everywhere, on processors and GPUs alike. The mean over the
    workers does not change. With :math:`p = 1` it is Local SGD. The algorithm has no state, and the
    consensus model is the mean.

    It is meant for a round after every local step (``sync_every=1``). Its authors report results
    for up to 16 workers.

    A worker with NaN or infinity cannot recover, because it receives a part of the parameters only:
    the run ends with an error.

    Args:
        fraction: Share p of the parameters that are averaged in a round, in (0, 1]; rounded such
            that 1/p is an integer.
        seed: Of the random sets; equal on all workers.

    Raises:
        TypeError: If ``seed`` is not an integer.
        ValueError: If ``fraction`` is out of range.

    Source:
        Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter
        Averaging", https://openreview.net/forum?id=stFPf3gzq1, whose code draws each element by
        itself and sends the mask.

    Example:
        >>> algorithm = SPARTA(fraction=0.5)
        >>> local, info = torch.tensor([1.0, 2.0, 3.0, 4.0]), RoundInfo(index=0)
        >>> message = algorithm.propose(local, {}, info)  # one of each pair
        >>> message
        tensor([1., 3.])
        >>> algorithm.update(local, None, torch.tensor([0.0, 0.0]), {}, info)
        tensor([0., 2., 0., 4.])
    """

    fraction: float = 0.005
    seed: int = 0

    exchange = "mean"
    reads = frozenset({"local"})
    sends_parameters = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not 0 < self.fraction <= 1:
            raise ValueError(
                "fraction is the share of the parameters that is averaged in a round and must be "
                f"in (0, 1], got {self.fraction}. Common values are 0.001 to 0.01."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}.")

    @property
    def granularity(self) -> int:
        """Length of a stretch of parameters of which one is averaged, 1/p."""
        return round(min(1 / self.fraction, _MASK))

    def message_length(self, length: int) -> int:
        """Return the number of stretches; the last one may be shorter."""
        return -(-length // self.granularity)

    def init(self, params: Tensor) -> State:
        """Return an empty state."""
        return {}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the parameters that are averaged in this round."""
        return params if self.granularity == 1 else params[self._chosen(params, info)]

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Put their means in place of them."""
        if self.granularity == 1:
            return received
        assert local is not None
        local[self._chosen(local, info)] = received
        return local

    def _chosen(self, params: Tensor, info: RoundInfo) -> Tensor:
        """Positions in the slice of the parameters that are averaged, ascending."""
        every, device = self.granularity, params.device
        first, length = info.start // every, self.message_length(len(params))
        stretches = torch.arange(first, first + length, device=device)
        offsets = random_integers(stretches, self.seed, info.index)
        if rest := len(params) % every:
            offsets[-1:] %= rest
        offsets %= every
        return offsets.add_(stretches.sub_(first), alpha=every)


def random_integers(counters: Tensor, seed: int, round_index: int) -> Tensor:
    """Return a random integer in [0, 2**31) for each counter, equal on all devices.

    Args:
        counters: Integers from 0, int64.
        seed: Any integer.
        round_index: Number of the round, from 0.
    """
    key = 0
    for number in (seed, round_index):
        key = _mixed((key + number * 0x9E3779B9 + 0x7F4A7C15) % _MASK)
    return _mixed((counters + key).bitwise_and_(_MASK))


def _mixed(value: _Integers) -> _Integers:
    """A one-to-one map of [0, 2**31), for a tensor in place; one bit changes half of all bits."""
    for multiplier in _HASH_MULTIPLIERS:
        value ^= value >> 15
        value *= multiplier
        value &= _MASK
    value ^= value >> 15
    return value
