"""The generators of random numbers, set to a known state."""

from __future__ import annotations

import random
import sys


def seed(number: int) -> None:
    """Seed the generators of Python, numpy and torch, as far as these are imported."""
    random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
