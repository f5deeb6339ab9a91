"""Schedules: when rounds begin and end. The engine asks them after every local step."""

from lightning_loco.schedules.every_interval import EveryInterval
from lightning_loco.schedules.every_steps import (
    EverySteps,
    SyncEvery,
    VaryingSteps,
    by_steps,
    steps_by_speed,
)
from lightning_loco.schedules.schedule import Schedule, StepInfo
from lightning_loco.schedules.staggered import Staggered, hidden_rounds, streaming_rounds

__all__ = [
    "EveryInterval",
    "EverySteps",
    "Schedule",
    "Staggered",
    "StepInfo",
    "SyncEvery",
    "VaryingSteps",
    "by_steps",
    "hidden_rounds",
    "steps_by_speed",
    "streaming_rounds",
]
