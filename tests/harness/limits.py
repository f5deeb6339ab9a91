"""Time limits in seconds that do not depend on how busy the machine is, and waits with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 60.0
"""How long something would take that is not to be waited for."""

SOON_S = 20.0
"""Who takes longer has waited for it."""

HARNESS_S = 60.0
"""Within which the others end after a worker is lost; tighter bounds are for the soak."""


def wait_until(condition: Callable[[], object], what: str = "the condition is still false") -> None:
    """Wait until the condition holds, or fail with the message ``what``."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
