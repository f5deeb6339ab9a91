"""What the arguments of the methods mean whose rounds are hidden behind local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_loco.algorithms import DiLoCo, MergePolicy, Mix
from lightning_loco.algorithms.diloco import OuterOptimizer
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.schedules import Schedule, SyncEvery, hidden_rounds, streaming_rounds


class HiddenRounds(NamedTuple):
    """The parts of a round that a method chooses."""

    algorithm: DiLoCo
    schedule: Schedule
    merge_policy: MergePolicy | None


def async_diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR | None,
    outer_momentum: float | None,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    warm_start: bool | None,
    fragments: int | Literal["auto"] | None,
    delay: int | None,
    mix: float | None,
) -> HiddenRounds:
    """As :class:`~lightning_loco.AsyncDiLoCoStrategy` describes them."""
    is_late = fragments is None and delay is None
    algorithm = DiLoCo(
        (0.7 if is_late else 0.6) if outer_lr is None else outer_lr,
        (0.0 if is_late else 0.8) if outer_momentum is None else outer_momentum,
        nesterov,
        outer_optimizer,
    )
    warm_start = is_late if warm_start is None else warm_start
    schedule = hidden_rounds(sync_every, fragments, delay, warm_start)
    share = (0.0 if is_late else 0.25) if mix is None else mix
    return HiddenRounds(algorithm, schedule, _mixed(share, schedule))


def streaming_diloco(
    sync_every: int | Sequence[int],
    fragments: int | Literal["auto"],
    delay: int | Literal["auto"],
    mix: float,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    pattern: Literal["strided", "contiguous", "even"] | Sequence[str],
) -> HiddenRounds:
    """As :class:`~lightning_loco.StreamingDiLoCoStrategy` describes them."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    schedule = streaming_rounds(sync_every, fragments, delay, pattern)
    return HiddenRounds(algorithm, schedule, _mixed(mix, schedule))


def _mixed(mix: float, schedule: Schedule) -> MergePolicy | None:
    """The landing of late results with a local share; None for the algorithm's own.

    A result that comes a whole phase late and is taken as it is loses no local steps that way: the
    next message, which is made before, tells of them.
    """
    merge_policy = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else merge_policy
