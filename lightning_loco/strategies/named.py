"""The named strategies: one method each, with its own arguments and the common ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_momentum import OuterMomentum
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.algorithms.robust import Aggregate
from lightning_loco.compression import Codec, ErrorFeedback
from lightning_loco.costs import LinkLike
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.clock_engine import ClockEngine
from lightning_loco.engine.method_settings import (
    async_diloco,
    async_model_average,
    delayed_nesterov,
    diloco,
    eager_diloco,
    gasloc,
    local_sgd,
    noloco,
    sparta,
    streaming_diloco,
)
from lightning_loco.schedules import SyncEvery
from lightning_loco.strategies.arguments import CommonArguments, RoundArguments
from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.topology import Topology


class LocalSGDStrategy(LocoStrategy):
    """Local SGD: average the parameters every ``sync_every`` steps.

    See :class:`~lightning_loco.algorithms.LocalSGD` for the formula and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Example::

        Trainer(strategy=LocalSGDStrategy(sync_every=50), devices=4)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 100,
        **common: Unpack[RoundArguments],
    ) -> None:
        self._init_rounds(local_sgd(sync_every), **common)


class DiLoCoStrategy(LocoStrategy):
    """DiLoCo: an outer optimizer follows the mean pseudo-gradient.

    See :class:`~lightning_loco.algorithms.DiLoCo` for the formula and the outer arguments, and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Example::

        Trainer(strategy=DiLoCoStrategy(sync_every=500), devices=8, num_nodes=3)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: OuterMomentum = "auto",
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        aggregate: Aggregate = "mean",
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = diloco(
            sync_every, outer_lr, outer_momentum, nesterov, outer_optimizer, aggregate
        )
        self._init_rounds(settings, **common)


class DelayedNesterovStrategy(LocoStrategy):
    """DiLoCo with plain outer steps, and momentum once in several rounds.

    See :class:`~lightning_loco.algorithms.DelayedNesterov` for the formula, and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Args:
        sync_every: Local steps between rounds.
        outer_lr: Outer learning rate of a block of rounds: DiLoCo's times ``every``; or a schedule
            of rates.
        outer_momentum: Momentum in [0, 1), from one block to the next.
        every: Number of rounds in a block, the last of which applies the momentum.
        between: Share of the momentum in each of the other rounds, up to ``1 / every``.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Example::

        Trainer(strategy=DelayedNesterovStrategy(sync_every=50, every=2), devices=4, num_nodes=8)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 1.4,
        outer_momentum: float = 0.5,
        every: int = 2,
        between: float = 0.0,
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = delayed_nesterov(sync_every, outer_lr, outer_momentum, every, between)
        self._init_rounds(settings, **common)


class AsyncDiLoCoStrategy(LocoStrategy):
    """DiLoCo whose communication is hidden behind the next local steps.

    The model is divided into equal fragments that take turns: the round of one starts every
    ``sync_every / fragments`` local steps, and its result is mixed into the local parameters when
    the next one starts. So the link can be used all the time, no worker waits for it, and a result
    is late by at most a part of a round. :class:`StreamingDiLoCoStrategy` is the same with other
    choices: fragments of whole layers, and a delay of a few local steps.

    With ``fragments=None`` the whole model is exchanged at once, and its result is applied a whole
    round later, from where local steps restart: the order of PCCL's async DiLoCo. Then outer
    momentum is off by default, because it may be unstable with a delay of one round.

    Args:
        sync_every: Local steps between the rounds of a fragment.
        outer_lr: Outer learning rate, or a schedule of rates.
        outer_momentum: Outer momentum in [0, 1), or ``"auto"``, the default; without fragments the
            default is 0, and (0.7, 0.3) or (0.2, 0.9) are stable.
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`; it needs
            ``fragments=1`` or None.
        warm_start: Make the first round of each fragment a blocking one. Default: only without
            fragments, where the progress before the first result would be lost; False is PCCL's
            order.
        fragments: In how many equal parts the parameters are exchanged, at most ``sync_every``.
            ``"auto"`` is 4, or ``sync_every`` if that is less. None for the whole model, whose
            result is applied a whole round later unless there is a ``delay``.
        delay: Local steps after which a result is applied, at most ``sync_every``. Default: at the
            start of the next round, ``sync_every // fragments``. Fewer suffice for a fast link.
        mix: Share in [0, 1] of the local parameters when a result is applied. Default: 0.25; 0
            without fragments. With 0 it replaces them, and the local steps made since the start of
            the round are lost or, without fragments, part of the next message.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512;
        without fragments the async DiLoCo example of PCCL.

    Example::

        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
        Trainer(strategy=AsyncDiLoCoStrategy(sync_every=500, fragments=None), devices=4)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: OuterMomentum | None = None,
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        warm_start: bool | None = None,
        fragments: int | Literal["auto"] | None = "auto",
        delay: int | None = None,
        mix: float | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = async_diloco(
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
        self._init_rounds(settings, **common)


class StreamingDiLoCoStrategy(LocoStrategy):
    """DiLoCo of fragments that take turns, each exchanged while local steps go on.

    The model is divided into fragments by layer. Every ``sync_every / fragments`` local steps the
    round of one of them starts; its result is mixed into the local parameters ``delay`` local steps
    later. So a single exchange sends only a part of the model, and no worker waits.

    See :class:`~lightning_loco.algorithms.DiLoCo` for the formula and the outer arguments,
    :class:`~lightning_loco.schedules.Staggered` for when rounds start and end, and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Args:
        sync_every: Local steps between the rounds of one fragment, at least ``fragments``; or one
            number per worker.
        fragments: In how many parts the model is exchanged; at most its layers. ``"auto"`` is 3, or
            ``sync_every`` if that is less.
        delay: Local steps after which a result is applied, from 0 (a blocking round) up to
            ``sync_every``. ``"auto"`` is 5, or half of ``sync_every`` if that is less.
        mix: Share in [0, 1] of the local parameters when a result is applied; with 0 the
            result replaces them. The paper has 0.5.
        outer_lr: Outer learning rate. The paper has 0.4.
        outer_momentum: Outer momentum in [0, 1), or ``"auto"``. The paper has 0.9.
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer, as in :class:`DiLoCoStrategy`; it needs
            ``fragments=1``.
        pattern: ``"strided"`` assigns the layers in turns, ``"contiguous"`` keeps neighbours
            together, ``"even"`` makes equal parts; or a list with a regular expression on parameter
            names for each fragment.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example::

        Trainer(strategy=StreamingDiLoCoStrategy(sync_every=100, delay=5), devices=4, num_nodes=8)
    """

    def __init__(
        self,
        sync_every: int | Sequence[int] = 100,
        fragments: int | Literal["auto"] = "auto",
        delay: int | Literal["auto"] = "auto",
        mix: float = 0.25,
        outer_lr: float = 0.7,
        outer_momentum: OuterMomentum = "auto",
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        pattern: Literal["strided", "contiguous", "even"] | Sequence[str] = "strided",
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = streaming_diloco(
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
        self._init_rounds(settings, **common)


class EagerDiLoCoStrategy(LocoStrategy):
    """Async DiLoCo in which each worker applies its own pseudo-gradient without delay.

    See :class:`~lightning_loco.algorithms.EagerDiLoCo` for the formula and the outer arguments,
    and :class:`RoundArguments` for the arguments that strategies with rounds share.

    Example::

        Trainer(strategy=EagerDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        warm_start: bool = True,
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = eager_diloco(sync_every, outer_lr, outer_momentum, nesterov, warm_start)
        self._init_rounds(settings, **common)


class GASLoCStrategy(LocoStrategy):
    """GASLoC: local steps, gossip with the neighbours of a topology, and momentum.

    See :class:`~lightning_loco.algorithms.GASLoC` for the formula and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Args:
        topology: A name (``ring complete star torus grid hypercube exponential
            one_peer_exponential xor random_matching random_two_peer``), a ``Topology``, a networkx
            graph, an ``(N, N)`` mixing matrix or an edge-list file.
        sync_every: Local steps between rounds, or one number per worker.
        outer_lr: Factor of the drift, eta; or a schedule of rates.
        gossip_step: Factor of the step towards the neighbours, alpha; ``"auto"`` fits the topology.
        momentum: Factor gamma; ``"auto"`` fits the topology.
        momentum_on: ``"gossiped"``, or ``"local"`` as in the paper.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Example::

        Trainer(strategy=GASLoCStrategy("random_matching", sync_every=50), devices=8)
    """

    def __init__(
        self,
        topology: Topology | str | Any = "ring",
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        gossip_step: float | Literal["auto"] = "auto",
        momentum: float | Literal["auto"] = "auto",
        momentum_on: Literal["local", "gossiped"] = "gossiped",
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = gasloc(topology, sync_every, outer_lr, gossip_step, momentum, momentum_on)
        self._init_rounds(settings, **common)


class NoLoCoStrategy(LocoStrategy):
    """NoLoCo: outer momentum without an all-reduce, by gossip in random pairs of workers.

    See :class:`~lightning_loco.algorithms.NoLoCo` for the formula, and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Args:
        topology: Who exchanges with whom, as in :class:`GASLoCStrategy`. Default: random pairs.
        sync_every: Local steps between rounds, or one number per worker.
        outer_momentum: Outer momentum in [0, 1), alpha in the paper.
        outer_lr: Outer learning rate, beta in the paper.
        gossip_step: Step towards the mean of the pair, gamma in the paper. Default: ``outer_lr``.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Source:
        Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
        Models", arXiv:2506.10911.

    Example::

        Trainer(strategy=NoLoCoStrategy(sync_every=50), devices=8, num_nodes=4)
    """

    def __init__(
        self,
        topology: Topology | str | Any | None = None,
        sync_every: SyncEvery = 100,
        outer_momentum: float = 0.5,
        outer_lr: float = 0.7,
        gossip_step: float | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = noloco(topology, sync_every, outer_momentum, outer_lr, gossip_step)
        self._init_rounds(settings, **common)


class SPARTAStrategy(LocoStrategy):
    """SPARTA: average a small random part of the parameters, by default after every local step.

    See :class:`~lightning_loco.algorithms.SPARTA` for the formula, and
    :class:`RoundArguments` for the arguments that strategies with rounds share.

    Args:
        sync_every: Local steps between rounds.
        fraction: Share of the parameters that is averaged in a round, in (0, 1].
        seed: Of the random parts; equal on all workers.
        common: The arguments that strategies with rounds share, :class:`RoundArguments`.

    Source:
        Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter
        Averaging", https://openreview.net/forum?id=stFPf3gzq1.

    Example::

        Trainer(strategy=SPARTAStrategy(fraction=0.005), devices=8)
    """

    def __init__(
        self,
        sync_every: SyncEvery = 1,
        fraction: float = 0.005,
        seed: int = 0,
        **common: Unpack[RoundArguments],
    ) -> None:
        self._init_rounds(sparta(sync_every, fraction, seed), **common)


class AsyncModelAverageStrategy(LocoStrategy):
    """Average the workers' models in the background at fixed time intervals.

    Every ``interval_s`` seconds each worker sends a snapshot of its parameters between two local
    steps, and between two later ones it adds the mean of the snapshots minus its own. No worker
    waits for a slower one. See :class:`~lightning_loco.algorithms.ModelAverage` for the formula and
    :class:`~lightning_loco.ClockEngine` for what happens when.

    Workers may take different numbers of steps. Before validation, checkpoints and the end of
    training the averaging pauses; workers that arrive early take part in the rounds of the others
    until all have arrived. When rounds start depends on the clock, so two runs are never equal bit
    for bit; a resumed run starts from the workers' exact states.

    Args:
        interval_s: Pause between the end of a round and the next one, in seconds; may be 0.
        warmup_steps: Local steps at the start whose gradients are averaged as in DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        compression: How messages are written on the wire, as in :class:`RoundArguments`.
        link: A slower link to emulate, as in :class:`RoundArguments`.
        common: The arguments that strategies with workers share, :class:`CommonArguments`.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        Trainer(strategy=AsyncModelAverageStrategy(interval_s=0.5), devices=8)
    """

    def __init__(
        self,
        interval_s: float = 0.5,
        warmup_steps: int = 0,
        topology: Any | None = None,
        compression: Codec | ErrorFeedback | str | None = None,
        *,
        link: LinkLike | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        settings = async_model_average(interval_s, warmup_steps, topology, compression, link)
        self._init_with(settings, **common)

    def engine_of(
        self, model: nn.Module, group: WorkerGroup, optimized: Sequence[Tensor] | None
    ) -> ClockEngine:
        """Make an engine whose rounds start after a pause and end when all messages are there."""
        return ClockEngine.from_settings(model, self.settings, group, optimized)

    @property
    def _clock(self) -> ClockEngine:
        assert isinstance(self._engine, ClockEngine)
        return self._engine

    def abort(self) -> None:
        """Stop the averaging during ``fit``; every worker must call it; twice is safe."""
        self._clock.abort()

    def resume(self) -> None:
        """Resume averaging after :meth:`abort`; every worker must call it; twice is safe."""
        self._clock.resume()
