"""The named strategies: one method each, its arguments spelled out, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import Unpack

from lightning_loco.algorithms import DiLoCo, GASLoC, Landing, LocalSGD, Mix
from lightning_loco.algorithms.diloco import OuterOptimizer
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.schedules import Schedule, Staggered, SyncEvery, by_steps
from lightning_loco.strategies.arguments import RoundArguments, spelled_out
from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.topology import Topology


def mixed(mix: float, schedule: Schedule) -> Landing | None:
    """The landing of late results with a local share; None for the algorithm's own.

    A result that comes a whole phase late and is taken as it is loses no local steps that way: the
    next message, which is made before, tells of them.
    """
    landing = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else landing


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
        delay: Local steps after which a result is applied, at most ``sync_every``. Default: with
            the next round, a whole phase late. Fewer lose less, and hide a faster exchange.
        mix: Share in [0, 1] of the local parameters when a result is applied; with 0 it replaces
            them, and the local steps made since the round began are lost, or, with the default
            delay, told of by the next message.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Example::

        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=10, delay=2, mix=0.5), devices=4)
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
        delay: int | None = None,
        mix: float = 0.0,
        **common: Unpack[RoundArguments],
    ) -> None:
        algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
        schedule: Schedule = by_steps(sync_every, True, warm_start)
        if delay is not None:  # a mapping is refused there
            schedule = Staggered(sync_every, 1, delay, warm_start=warm_start)  # type: ignore[arg-type]
        self._init_rounds(algorithm, schedule, mixed(mix, schedule), **common)


class StreamingDiLoCoStrategy(LocoStrategy):
    """DiLoCo of fragments that take turns, each exchanged while local steps go on.

    The model is divided into fragments by layer. Every ``sync_every / fragments`` local steps the
    round of one of them begins; its result is mixed into the local parameters ``delay`` local steps
    later. So the most that travels at once is a part of the model, and nobody waits.

    See :class:`~lightning_loco.algorithms.DiLoCo` for the formula and the outer arguments,
    :class:`~lightning_loco.schedules.Staggered` for when rounds begin and end, and
    :class:`LocoStrategy` for the arguments that all strategies share.

    Args:
        sync_every: Local steps between the rounds of one fragment, at least ``fragments``; or one
            number per worker.
        fragments: In how many parts the model is exchanged; at most its layers.
        delay: Local steps after which a result is applied, from 0, which waits for it, up to
            ``sync_every``.
        mix: Share in [0, 1] of the local parameters when a result is applied; 0 takes the result.
        outer_lr: Outer learning rate.
        outer_momentum: Outer momentum in [0, 1).
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`; it needs
            ``fragments=1``.
        pattern: ``"strided"`` deals the layers out in turns, ``"contiguous"`` keeps neighbours
            together; or a list with a regular expression on parameter names for each fragment.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example::

        Trainer(strategy=StreamingDiLoCoStrategy(sync_every=100, delay=5), devices=4, num_nodes=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: int | Sequence[int] = 100,
        fragments: int = 3,
        delay: int = 5,
        mix: float = 0.5,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        pattern: Literal["strided", "contiguous"] | Sequence[str] = "strided",
        **common: Unpack[RoundArguments],
    ) -> None:
        algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
        schedule = Staggered(sync_every, fragments, delay, pattern)
        self._init_rounds(algorithm, schedule, mixed(mix, schedule), **common)


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
