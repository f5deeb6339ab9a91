"""The random number generators of a process: their states as plain values, and back."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """The states of all random number generators, as plain values and tensors.

    That of CUDA is among them only if this process uses CUDA already.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy as np
    except ImportError:
        return states
    name, keys, *rest = np.random.get_state(legacy=True)
    states["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put all random number generators where :func:`random_states` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy as np

        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
