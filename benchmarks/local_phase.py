"""A model whose local steps are sleeps, as if a GPU computed while the CPU can communicate."""

from __future__ import annotations

import time

import torch
from torch import nn

from lightning_loco import StepEngine

SYNC_EVERY = 5


def make_model(width: int) -> nn.Module:
    """20 layers of ``width x width``, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(20)))


def make_round(engine: StepEngine, phase_s: float) -> float:
    """Local steps of so many seconds in all, and then the seconds of a round."""
    for _ in range(SYNC_EVERY - 1):
        time.sleep(phase_s / SYNC_EVERY)
        engine.step()
    time.sleep(phase_s / SYNC_EVERY)
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started
