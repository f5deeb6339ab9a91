"""How long is long: limits in seconds that do not depend on how busy the machine is."""

from __future__ import annotations

LONG_S = 60.0
"""How long something would take that is not to be waited for."""

SOON_S = 20.0
"""Who takes longer has waited for it."""

HARNESS_S = 60.0
"""Within which the others end after a worker is lost; tighter bounds are for the soak."""
