"""Algorithm, schedule and merge policy for the arguments of async and streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_loco.algorithms import DiLoCo, MergePolicy, Mix
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.schedules import Schedule, SyncEvery, hidden_rounds, streaming_rounds


class HiddenRounds(NamedTuple):
    """The parts of the settings that async and streaming DiLoCo determine."""

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
    """Return the parts of :class:`~lightning_loco.AsyncDiLoCoStrategy`."""
    is_one_round_late = fragments is None and delay is None
    algorithm = DiLoCo(
        (0.7 if is_one_round_late else 0.6) if outer_lr is None else outer_lr,
        (0.0 if is_one_round_late else 0.8) if outer_momentum is None else outer_momentum,
        nesterov,
        outer_optimizer,
    )
    warm_start = is_one_round_late if warm_start is None else warm_start
    schedule = hidden_rounds(sync_every, fragments, delay, warm_start)
    share = (0.0 if is_one_round_late else 0.25) if mix is None else mix
    return HiddenRounds(algorithm, schedule, _merge_policy(share, schedule))


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
    """Return the parts of :class:`~lightning_loco.StreamingDiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    schedule = streaming_rounds(sync_every, fragments, delay, pattern)
    return HiddenRounds(algorithm, schedule, _merge_policy(mix, schedule))


def _merge_policy(mix: float, schedule: Schedule) -> MergePolicy | None:
    """Return the merge policy for a share of the local parameters; None for the algorithm's own.

    With ``mix=0`` and results that are a whole round late, the algorithm's ``Restart()`` loses no
    local steps: they are in the next message, which is computed before the result is applied.
    """
    merge_policy = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else merge_policy
