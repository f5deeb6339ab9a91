"""Local steps in proportion to speed, so that no worker waits for a slower one."""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROUNDING = 1e-9


def steps_by_speed(speeds: Sequence[float], sync_every: int) -> list[int]:
    r"""Turn measured speeds into a list for ``sync_every``.

    .. math:: H_i = \max(1, \lfloor H\, v_i / \max_j v_j \rfloor)

    Args:
        speeds: Local steps per second of each worker, or anything in proportion; positive.
        sync_every: Local steps H of the fastest worker between rounds, at least 1.

    Raises:
        ValueError: If there is no speed, or a number is out of range.

    Source:
        The dynamic local updates (DyLU) of Liu et al., "Asynchronous Local-SGD Training for
        Language Modeling", arXiv:2401.09135.

    Example:
        >>> steps_by_speed([4.1, 4.0, 1.0], sync_every=50)
        [50, 48, 12]
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"speeds must be positive, one per worker, got {list(speeds)}. Give local steps per "
            "second, say."
        )
    if sync_every < 1:
        raise ValueError(f"sync_every must be at least 1, got {sync_every}.")
    fastest = max(speeds)
    return [max(1, math.floor(sync_every * speed / fastest + _ROUNDING)) for speed in speeds]
