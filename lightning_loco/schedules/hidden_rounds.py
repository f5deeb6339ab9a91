"""The schedules of async and streaming DiLoCo, whose rounds are hidden behind local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from lightning_loco.schedules.base import Schedule
from lightning_loco.schedules.every_steps import check_sync_every
from lightning_loco.schedules.staggered import Staggered
from lightning_loco.schedules.varying_steps import SyncEvery, by_steps

FRAGMENTS = 4
"""The number of fragments that ``"auto"`` stands for, unless there are fewer local steps."""


def hidden_rounds(
    sync_every: SyncEvery,
    fragments: int | Literal["auto"] | None = "auto",
    delay: int | None = None,
    warm_start: bool = False,
) -> Schedule:
    """Return a schedule of equal fragments that are exchanged in turn, one at a time.

    Args:
        sync_every: Local steps between the rounds of a fragment, or one number per worker.
        fragments: Number of fragments; ``"auto"`` for :data:`FRAGMENTS`, but at most the number of
            local steps. None for the whole model.
        delay: Local steps after which a result is applied. Default: until the next round begins.
        warm_start: The first round of each fragment ends at once.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or ``sync_every`` changes and there are fragments.

    Example:
        >>> hidden_rounds(100)
        Staggered(sync_every=100, fragments=4, delay=25, pattern='even', warm_start=False)
        >>> hidden_rounds(100, fragments=None)
        EverySteps(sync_every=100, overlap=True, warm_start=False)
    """
    if fragments is None and delay is None:
        return by_steps(sync_every, True, warm_start)
    if isinstance(sync_every, Mapping):
        raise ValueError(
            "Fragments and delay=... need one sync_every for the whole run, got "
            f"{dict(sync_every)}. Use fragments=None without delay, or one number."
        )
    check_sync_every(sync_every)
    steps = _fewest_steps(sync_every)
    count = 1 if fragments is None else min(FRAGMENTS, steps) if fragments == "auto" else fragments
    schedule = Staggered(sync_every, count, 0 if delay is None else delay, "even", warm_start)
    return (
        schedule
        if delay is not None
        else dataclasses.replace(schedule, delay=schedule.shortest_gap)
    )


def streaming_rounds(
    sync_every: int | Sequence[int],
    fragments: int | Literal["auto"] = "auto",
    delay: int | Literal["auto"] = "auto",
    pattern: str | Sequence[str] = "strided",
) -> Staggered:
    """Return a schedule of fragments of layers that are exchanged in turn, as in streaming DiLoCo.

    Args:
        sync_every: Local steps between the rounds of a fragment, or one number per worker.
        fragments: Number of fragments; ``"auto"`` for 3, but at most the number of local steps.
        delay: Local steps after which a result is applied; ``"auto"`` for 5, or half of
            ``sync_every`` if that is less.
        pattern: As in :class:`Staggered`.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.

    Example:
        >>> streaming_rounds(4)
        Staggered(sync_every=4, fragments=3, delay=2, pattern='strided', warm_start=False)
    """
    check_sync_every(sync_every)
    steps = _fewest_steps(sync_every)
    count = min(3, steps) if fragments == "auto" else fragments
    delay_steps = min(5, max(1, steps // 2)) if delay == "auto" else delay
    return Staggered(sync_every, count, delay_steps, pattern)


def _fewest_steps(sync_every: int | Sequence[int]) -> int:
    return sync_every if isinstance(sync_every, int) else min(sync_every, default=1)
