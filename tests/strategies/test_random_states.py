"""Random states are taken without waking a GPU, and come back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_loco.strategies.checkpoint.position import random_states, set_random_states


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())


def test_all_generators_come_back() -> None:
    states = random_states()
    first = draw()
    assert draw() != first
    set_random_states(states)
    assert draw() == first


def test_a_gpu_that_is_not_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on a GPU takes hundreds of megabytes, for a run on CPUs too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("woke the GPU"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("woke the GPU"))
    states = random_states()
    assert "cuda" not in states
    set_random_states({**states, "cuda": states["torch"]})
