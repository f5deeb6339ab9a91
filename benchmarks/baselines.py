"""Methods of papers that the package does not have, written against its public contracts.

:mod:`low_communication` compares them with the methods of the package. Those of gossip after every
local step are in :mod:`gossip_baselines`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, MergePolicy, RoundInfo, State
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.app.demo.model import learning_rate_factor
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Staggered, StepInfo, SyncEvery
from lightning_loco.simulation.rounds import Rounds
from lightning_loco.simulation.simulation import FAMILIES


@dataclasses.dataclass(frozen=True)
class SlowMo(Algorithm):
    r"""SlowMo, algorithm 1 of Wang et al., arXiv:1910.00643, with the mean of all workers.

    .. math::
        u \leftarrow \beta u + \frac{1}{\gamma_t}\Big(x - \frac{1}{N}\sum_i x^i\Big), \qquad
        x \leftarrow x - \alpha \gamma_t u, \qquad x^i \leftarrow x

    The state of the local optimizers is kept, which is the paper's choice for Adam. While
    :math:`\gamma_t` does not change, it is DiLoCo with heavy-ball momentum.

    Args:
        slow_lr: :math:`\alpha`.
        slow_momentum: :math:`\beta` in [0, 1).
        fast_lr: :math:`\gamma_t`, the learning rate of local steps: a number, or a function of the
            index of a round.
    """

    slow_lr: float = 1.0
    slow_momentum: float = 0.5
    fast_lr: OuterLR = 1.0

    exchange = "mean"
    start_key = "outer"
    consensus_key = "outer"
    replicated = True

    def init(self, params: Tensor) -> State:
        return {"outer": params, "momentum": torch.zeros_like(params)}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return torch.sub(state["outer"], params, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        rate = self.fast_lr(info.index) if callable(self.fast_lr) else self.fast_lr
        momentum: Tensor = state["momentum"].mul_(self.slow_momentum).add_(received, alpha=1 / rate)
        outer: Tensor = state["outer"]
        return outer.add_(momentum, alpha=-self.slow_lr * rate)


@dataclasses.dataclass(frozen=True)
class DemoRate:
    """The learning rate of the demo's model by the index of a round, up to a factor.

    SlowMo needs no more: another unit of the learning rate changes that of the momentum only.

    Args:
        rounds: Number of rounds of the run.
        steps: Local steps of the learning-rate schedule.
        warmup_steps: Of them, those with a rising rate.
    """

    rounds: int
    steps: int
    warmup_steps: int

    def __call__(self, index: int) -> float:
        step = (index + 1) * self.steps // self.rounds - 1
        return learning_rate_factor(step, self.warmup_steps, self.steps)


class MergedByAlgorithm(MergePolicy):
    """For algorithms whose late results already hold the local steps taken meanwhile."""

    keeps_progress = True
    keeps_sent = False


@dataclasses.dataclass(frozen=True)
class LOSCAR(Algorithm):
    r"""LOSCAR-SGD of Maziane et al., arXiv:2605.20866: late means of a random part.

    .. math::
        x^i_k \leftarrow \frac{1}{N}\sum_j y^j_k + (z^i_k - y^i_k) \quad \text{for } k \in S_t

    with the parameters :math:`y^i` when a message was sent, the present ones :math:`z^i`, and a
    uniformly random set :math:`S_t` of elements, the same on all workers. Others stay as they are.

    Args:
        fraction: Elements of :math:`S_t`, as a share of all parameters.
        seed: Of the random sets.
    """

    fraction: float = 0.5
    seed: int = 0

    exchange = "mean"
    reads = frozenset({"local", "message"})
    sends_parameters = True
    merge_policy = MergedByAlgorithm()
    granularity = None  # type: ignore[assignment]  # a set of a slice would not be uniform

    def message_length(self, length: int) -> int:
        return max(1, round(self.fraction * length))

    def init(self, params: Tensor) -> State:
        return {}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params[self.chosen(len(params), info.index)]

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert local is not None
        assert message is not None
        local[self.chosen(len(local), info.index)] += received - message
        return local

    def chosen(self, length: int, index: int) -> Tensor:
        """Return the elements of a round."""
        order = np.random.default_rng([self.seed, index]).permutation(length)
        return torch.from_numpy(order[: self.message_length(length)])


@dataclasses.dataclass(frozen=True)
class LateParts(RoundSettings):
    """Late results of a part of the parameters, for an algorithm that merges them itself.

    ``RoundSettings`` refuses them, because no other merge policy can.
    """

    def _check_messages(self, algorithm: Algorithm) -> None:
        assert isinstance(algorithm.merge_policy, MergedByAlgorithm)


FAMILIES[LateParts] = Rounds


def loscar(sync_every: SyncEvery, delay: int, fraction: float, seed: int = 0) -> LateParts:
    """Return the settings of LOSCAR whose results are ``delay`` local steps late."""
    schedule = Staggered(sync_every, fragments=1, delay=delay, pattern="even")
    return LateParts(LOSCAR(fraction, seed), schedule)


@dataclasses.dataclass(frozen=True)
class FactoredGossip(Algorithm):
    r"""Factored gossip DiLoCo of Koneputugodage et al., arXiv:2606.22768.

    The abstract says that the synchronization of DiLoCo is factored "into a non-blocking mixing
    step that overlaps computation with no staleness, and a blocking mixing step". The text of the
    paper was not at hand, and this is how we read it: each worker has its own outer parameters
    :math:`\Theta^i` and momentum. The outer parameters are mixed while local steps start from
    those that are not mixed, so no pseudo-gradient is late, and the result of the outer step is
    mixed again, before the next local step:

    .. math::
        \bar\Theta^i = \sum_j W_{ij} \Theta^j, \quad \Delta^i = \Theta^i - \theta^i, \quad
        m^i \leftarrow \mu m^i + \Delta^i, \quad
        \Theta^i \leftarrow \sum_j W'_{ij}
            \big(\bar\Theta^j - \eta\,(\Delta^j + \mu m^j)\big), \quad \theta^i \leftarrow \Theta^i

    On a complete graph it is DiLoCo.

    Args:
        outer_lr: :math:`\eta`.
        outer_momentum: :math:`\mu` in [0, 1), of Nesterov.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.5

    exchange = "neighbors"
    reads = frozenset({"local"})
    start_key = "outer"
    default_topology = "random_matching"
    merge_policy = MergedByAlgorithm()

    def init(self, params: Tensor) -> State:
        vectors = {"mixed": params.clone(), "momentum": torch.zeros_like(params)}
        return {"outer": params, **vectors}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the outer parameters during local steps, and their next value after these."""
        if TwoMixes.is_hidden(info.index):
            return params.copy_(state["outer"])
        delta = torch.sub(state["outer"], params, out=params)
        rate, mu = self.outer_lr, self.outer_momentum
        step = delta.mul_(1 + mu).add_(state["momentum"], alpha=mu * mu)  # delta + mu m
        return torch.sub(state["mixed"], step, alpha=rate, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert local is not None
        if TwoMixes.is_hidden(info.index):
            state["mixed"].copy_(received)
            return local
        outer: Tensor = state["outer"]
        state["momentum"].mul_(self.outer_momentum).add_(outer).sub_(local)
        return outer.copy_(received)


@dataclasses.dataclass(frozen=True)
class TwoMixes(EverySteps):
    """The two rounds of a phase of :class:`FactoredGossip`: one hidden by it, one at its end.

    A phase has ``sync_every`` local steps, at least 2.
    """

    @staticmethod
    def is_hidden(round_index: int) -> bool:
        """Return whether it is the first of a phase, which begins after one local step."""
        return round_index % 2 == 0

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        begins = info.steps_since_round >= self.steps_of_round(0, info.round_index - 1)
        return begins, begins and info.pending is not None

    def is_overlapped(self, round_index: int) -> bool:
        return self.is_hidden(round_index)

    def steps_of_round(self, worker: int, round_index: int) -> int:
        return self.sync_every_of(worker) - 1 if self.is_hidden(round_index) else 1

    def __str__(self) -> str:
        return f"two rounds every {self.sync_every} local steps, the first one hidden"


def factored_gossip(
    sync_every: SyncEvery, outer_lr: float, outer_momentum: float, topology: str = "random_matching"
) -> RoundSettings:
    """Return the settings of factored gossip DiLoCo."""
    algorithm = FactoredGossip(outer_lr, outer_momentum)
    return RoundSettings(algorithm, TwoMixes(sync_every), topology)
