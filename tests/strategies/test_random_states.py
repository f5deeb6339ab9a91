"""Random states are read without initializing a GPU, and can be restored."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_loco.strategies.checkpoint.position import random_states, set_random_states


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())


def test_all_generators_are_restored() -> None:
    states = random_states()
    first = draw()
    assert draw() != first
    set_random_states(states)
    assert draw() == first


def test_an_unused_gpu_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU context takes hundreds of megabytes, even for a run on CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("woke the GPU"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("woke the GPU"))
    states = random_states()
    assert "cuda" not in states
    set_random_states({**states, "cuda": states["torch"]})
