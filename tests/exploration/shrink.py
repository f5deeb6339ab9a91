"""Makes a failing schedule shorter for as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.exploration.run import Outcome, Schedule, replay


def shrink(
    failing: Outcome, seconds: float, run: Callable[[Schedule], Outcome] = replay
) -> Outcome:
    """Return a run that fails like ``failing``, with as few choices as were found in the time.

    Parts of the schedule are left out, first large ones, then single choices. What a schedule does
    not say happens as is usual: see :class:`tests.exploration.choices.RecordedChoices`.
    """
    deadline = time.monotonic() + seconds
    choices = failing.schedule.choices

    def fails(rest: list[str]) -> bool:
        nonlocal failing
        outcome = run(Schedule(failing.schedule.world, failing.schedule.settings, rest))
        if outcome.kind != failing.kind:
            return False
        outcome.schedule.choices = rest
        failing = outcome
        return True

    if not fails(choices):
        return failing  # it depends on something else than the schedule
    length = max(1, len(choices) // 2)
    while length:
        start, has_shrunk = 0, False
        while start < len(choices):
            if time.monotonic() > deadline:
                return failing
            rest = choices[:start] + choices[start + length :]
            if fails(rest):
                choices, has_shrunk = rest, True
            else:
                start += length
        if not has_shrunk or length > 1:
            length //= 2
    return failing
