"""The settings of each method, from its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_loco.algorithms import (
    SPARTA,
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    LocalSGD,
    MergePolicy,
    Mix,
    ModelAverage,
    NeighborAverage,
    NoLoCo,
)
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_momentum import OuterMomentum
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.algorithms.robust import Aggregate
from lightning_loco.costs import LinkLike
from lightning_loco.engine.settings import WHOLE_MODEL_BYTES, RoundSettings
from lightning_loco.schedules import (
    EveryInterval,
    Schedule,
    SyncEvery,
    by_steps,
    hidden_rounds,
    streaming_rounds,
)


def local_sgd(sync_every: SyncEvery) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.LocalSGDStrategy`."""
    return RoundSettings(LocalSGD(), by_steps(sync_every))


def sparta(sync_every: SyncEvery, fraction: float, seed: int) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.SPARTAStrategy`."""
    return RoundSettings(SPARTA(fraction, seed), by_steps(sync_every))


def diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: OuterMomentum,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    aggregate: Aggregate,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.DiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer, aggregate)
    return RoundSettings(algorithm, by_steps(sync_every))


def async_diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: OuterMomentum | None,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    warm_start: bool | None,
    fragments: int | Literal["auto"] | None,
    delay: int | None,
    mix: float | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.AsyncDiLoCoStrategy`."""
    is_one_round_late = fragments is None and delay is None
    if outer_momentum is None:
        outer_momentum = 0.0 if is_one_round_late else "auto"
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    warm_start = is_one_round_late if warm_start is None else warm_start
    schedule = hidden_rounds(sync_every, fragments, delay, warm_start)
    share = (0.0 if is_one_round_late else 0.25) if mix is None else mix
    return RoundSettings(algorithm, schedule, merge_policy=_merge_policy(share, schedule))


def streaming_diloco(
    sync_every: int | Sequence[int],
    fragments: int | Literal["auto"],
    delay: int | Literal["auto"],
    mix: float,
    outer_lr: float,
    outer_momentum: OuterMomentum,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    pattern: Literal["strided", "contiguous", "even"] | Sequence[str],
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.StreamingDiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    schedule = streaming_rounds(sync_every, fragments, delay, pattern)
    return RoundSettings(algorithm, schedule, merge_policy=_merge_policy(mix, schedule))


def eager_diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: float,
    nesterov: bool,
    warm_start: bool,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.EagerDiLoCoStrategy`."""
    algorithm = EagerDiLoCo(outer_lr, outer_momentum, nesterov)
    return RoundSettings(algorithm, by_steps(sync_every, overlap=True, warm_start=warm_start))


def delayed_nesterov(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: float,
    every: int,
    between: float,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.DelayedNesterovStrategy`."""
    algorithm = DelayedNesterov(outer_lr, outer_momentum, every, between)
    return RoundSettings(algorithm, by_steps(sync_every))


def gasloc(
    topology: Any,
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    gossip_step: float | Literal["auto"],
    momentum: float | Literal["auto"],
    momentum_on: Literal["local", "gossiped"],
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.GASLoCStrategy`."""
    algorithm = GASLoC(outer_lr, gossip_step, momentum, momentum_on)
    return RoundSettings(algorithm, by_steps(sync_every), topology)


def noloco(
    topology: Any | None,
    sync_every: SyncEvery,
    outer_momentum: float,
    outer_lr: float,
    gossip_step: float | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.NoLoCoStrategy`."""
    algorithm = NoLoCo(outer_momentum, outer_lr, gossip_step)
    return RoundSettings(algorithm, by_steps(sync_every), topology)


def async_model_average(
    interval_s: float,
    warmup_steps: int,
    topology: Any | None,
    compression: Any | None,
    link: LinkLike | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.AsyncModelAverageStrategy`."""
    algorithm = ModelAverage() if topology is None else NeighborAverage()
    schedule = EveryInterval(interval_s, warmup_steps)
    settings = RoundSettings(algorithm, schedule, topology, bucket_bytes=WHOLE_MODEL_BYTES)
    return settings.with_options(compression=compression, link=link)


def _merge_policy(mix: float, schedule: Schedule) -> MergePolicy | None:
    """Return the merge policy for a share of the local parameters; None for the algorithm's own.

    With ``mix=0`` and results that are a whole round late, the algorithm's ``Restart()`` loses no
    local steps: they are in the next message, which is computed before the result is applied.
    """
    merge_policy = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else merge_policy
