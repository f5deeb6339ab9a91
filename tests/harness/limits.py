"""Time limits in seconds that do not depend on how busy the machine is, and waits with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 60.0
"""Duration of something that a test must not wait for."""

SOON_S = 20.0
"""Limit for a wait that ends soon; whatever takes longer has waited for ``LONG_S``."""

HARNESS_S = 60.0
"""Limit in which other ranks exit after a worker is lost; the soak has tighter bounds."""


def wait_until(condition: Callable[[], object], what: str = "the condition is still false") -> None:
    """Wait until the condition holds, or fail with the message ``what``."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
