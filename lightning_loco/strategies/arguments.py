"""Arguments that several strategies have, checked before anything is built."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_common_arguments(timeout_s: float, bucket_bytes: int, start_method: str) -> None:
    """Refuse what no strategy can work with.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If one is out of range, or the start method is unknown.
    """
    check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
    for name, number, kind in (
        ("timeout_s", timeout_s, (int, float)),
        ("bucket_bytes", bucket_bytes, int),
    ):
        if isinstance(number, bool) or not isinstance(number, kind):
            what = "an integer" if kind is int else "a number"
            raise TypeError(f"{name} must be {what}, got {number!r}.")
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {number!r}.")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a word that is none of the allowed ones.

    Raises:
        ValueError: With those that are.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
