"""The named strategies: one method each, its arguments spelled out, no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import Unpack

from lightning_loco.algorithms import DiLoCo, EagerDiLoCo, GASLoC, LocalSGD
from lightning_loco.algorithms.diloco import OuterOptimizer
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.engine.hidden_rounds import async_diloco, streaming_diloco
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

    The model is divided into equal fragments that take turns: the round of one begins every
    ``sync_every / fragments`` local steps, and its result is mixed into the local parameters when
    the next one begins. So the link may be busy all the time, nobody waits for it, and no result is
    late by more than a part of a round. :class:`StreamingDiLoCoStrategy` is the same with other
    choices: fragments of whole layers, and a delay of a few local steps.

    With ``fragments=None`` the whole model is exchanged at once and its result is needed a whole
    phase later, where local steps begin again at it: the order of PCCL's async DiLoCo. There outer
    momentum is off by default, because DiLoCo's (0.7, 0.9) is unstable one round late.

    Args:
        sync_every: Local steps between the rounds of a fragment.
        outer_lr: Outer learning rate, or a schedule of rates. Default: 0.6; 0.7 a phase late.
        outer_momentum: Outer momentum in [0, 1). Default: 0.8; 0 a phase late, where (0.7, 0.3) or
            (0.2, 0.9) are stable.
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`; it needs
            ``fragments=1`` or None.
        warm_start: Make the first round of each fragment a blocking one. Default: only a phase
            late, where the first one would be thrown away; False is PCCL's order.
        fragments: In how many equal parts the parameters are exchanged, at most ``sync_every``.
            ``"auto"`` is 4, or ``sync_every`` if that is less. None for the whole model, which is
            a phase late unless there is a ``delay``.
        delay: Local steps after which a result is applied, at most ``sync_every``. Default: with
            the begin of the next round, ``sync_every // fragments``. Fewer hide a faster exchange.
        mix: Share in [0, 1] of the local parameters when a result is applied. Default: 0.25; 0 a
            phase late. With 0 it replaces them, and the local steps made since the round began are
            lost or, a phase late, told of by the next message.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512;
        without fragments the async DiLoCo example of PCCL.

    Example::

        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=500, fragments=None), devices=4)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR | None = None,
        outer_momentum: float | None = None,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        warm_start: bool | None = None,
        fragments: int | Literal["auto"] | None = "auto",
        delay: int | None = None,
        mix: float | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        parts = async_diloco(
            sync_every,
            outer_lr,
            outer_momentum,
            nesterov,
            outer_optimizer,
            warm_start,
            fragments,
            delay,
            mix,
        )
        self._init_rounds(*parts, **common)


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
        fragments: In how many parts the model is exchanged; at most its layers. ``"auto"`` is 3, or
            ``sync_every`` if that is less.
        delay: Local steps after which a result is applied, from 0, which waits for it, up to
            ``sync_every``. ``"auto"`` is 5, or half of ``sync_every`` if that is less.
        mix: Share in [0, 1] of the local parameters when a result is applied; 0 takes the result.
        outer_lr: Outer learning rate.
        outer_momentum: Outer momentum in [0, 1).
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`; it needs
            ``fragments=1``.
        pattern: ``"strided"`` deals the layers out in turns, ``"contiguous"`` keeps neighbours
            together, ``"even"`` makes equal parts; or a list with a regular expression on parameter
            names for each fragment.
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
        fragments: int | Literal["auto"] = "auto",
        delay: int | Literal["auto"] = "auto",
        mix: float = 0.5,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        pattern: Literal["strided", "contiguous", "even"] | Sequence[str] = "strided",
        **common: Unpack[RoundArguments],
    ) -> None:
        parts = streaming_diloco(
            sync_every,
            fragments,
            delay,
            mix,
            outer_lr,
            outer_momentum,
            nesterov,
            outer_optimizer,
            pattern,
        )
        self._init_rounds(*parts, **common)


class EagerDiLoCoStrategy(LocoStrategy):
    """Async DiLoCo in which no worker waits for its own part of the mean.

    See :class:`~lightning_loco.algorithms.EagerDiLoCo` for the formula and :class:`LocoStrategy`
    for the arguments that all strategies share.

    Args:
        sync_every: Local steps between rounds, or one number per worker.
        outer_lr: Outer learning rate, or a schedule of rates.
        outer_momentum: Outer momentum.
        nesterov: Nesterov momentum.
        warm_start: Make the first round a blocking one.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Example::

        Trainer(strategy=EagerDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        warm_start: bool = True,
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(
            EagerDiLoCo(outer_lr, outer_momentum, nesterov),
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
