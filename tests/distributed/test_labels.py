"""The phases of a round have names in a profile."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_loco import DiLoCo, StepEngine
from lightning_loco.distributed.work import labelled


def test_a_profile_names_the_phases() -> None:
    engine = StepEngine(torch.nn.Linear(4, 4), DiLoCo(), sync_every=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step()
    engine.close()
    names = {event.name for event in profiler.events() or []}
    assert {"loco/propose", "loco/exchange", "loco/apply"} <= names


def test_without_a_profiler_there_is_no_label() -> None:
    assert not isinstance(labelled("loco/apply"), torch.autograd.profiler.record_function)
