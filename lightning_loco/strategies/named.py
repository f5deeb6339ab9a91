"""The named strategies: one method each, its arguments spelled out, no logic."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import Unpack

from lightning_loco.algorithms import DiLoCo, GASLoC, LocalSGD
from lightning_loco.algorithms.diloco import OuterOptimizer
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.schedules import SyncEvery
from lightning_loco.strategies.arguments import RoundArguments, spelled_out
from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.topology import Topology


class LocalSGDStrategy(LocoStrategy):
    """Local SGD: average the parameters every ``sync_every`` steps.

    See :class:`~lightning_loco.algorithms.LocalSGD` for the formula and
    :class:`LocoStrategy` for the arguments that all strategies share.

    Example::

        Trainer(strategy=LocalSGDStrategy(sync_every=50), devices=4)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(LocalSGD(), sync_every=sync_every, **common)


class DiLoCoStrategy(LocoStrategy):
    """DiLoCo: an outer optimizer follows the mean pseudo-gradient.

    See :class:`~lightning_loco.algorithms.DiLoCo` for the formula and the outer arguments, and
    :class:`LocoStrategy` for the arguments that all strategies share.

    Example::

        Trainer(strategy=DiLoCoStrategy(sync_every=500), devices=8, num_nodes=3)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(
            DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer),
            sync_every=sync_every,
            **common,
        )


class AsyncDiLoCoStrategy(LocoStrategy):
    """DiLoCo whose communication is hidden behind the next local steps.

    At the end of a local phase the previous round's mean is applied and the new pseudo-gradient
    leaves; its result is needed only one phase later. Outer momentum is off by default because
    DiLoCo's (0.7, 0.9) is unstable one round late.

    Args:
        sync_every: Local steps between rounds.
        outer_lr: Outer learning rate, or a schedule of rates.
        outer_momentum: Outer momentum; with momentum use (0.7, 0.3) or (0.2, 0.9).
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`.
        warm_start: Make the first round a blocking one, so that the first phase is not thrown
            away; False is the order of PCCL's async DiLoCo.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Example::

        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        warm_start: bool = True,
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(
            DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer),
            sync_every=sync_every,
            overlap=True,
            warm_start=warm_start,
            **common,
        )


class GASLoCStrategy(LocoStrategy):
    """GASLoC: local steps, gossip with the neighbours of a topology, and momentum.

    See :class:`~lightning_loco.algorithms.GASLoC` for the formula and
    :class:`LocoStrategy` for the arguments that all strategies share.

    Args:
        topology: A name (``ring complete star torus grid hypercube exponential
            one_peer_exponential xor random_matching random_two_peer``), a ``Topology``, a networkx
            graph, an ``(N, N)`` mixing matrix or an edge-list file.
        sync_every: Local steps between rounds, or one number per worker.
        outer_lr: How far along the drift, eta; or a schedule of rates.
        gossip_step: How far towards the neighbours, alpha; ``"auto"`` fits the topology.
        momentum: gamma; ``"auto"`` fits the topology.
        momentum_on: ``"local"`` or ``"gossiped"``.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Example::

        Trainer(strategy=GASLoCStrategy("random_matching", sync_every=50), devices=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        topology: Topology | str | Any = "ring",
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        gossip_step: float | Literal["auto"] = "auto",
        momentum: float | Literal["auto"] = "auto",
        momentum_on: Literal["local", "gossiped"] = "local",
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(
            GASLoC(outer_lr, gossip_step, momentum, momentum_on),
            sync_every=sync_every,
            topology=topology,
            **common,
        )
