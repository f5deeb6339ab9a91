"""Rounds by a schedule: one engine counts local steps, its fragments exchange and update."""

from lightning_loco.engine.clock_engine import ClockEngine
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.engine.step_engine import StepEngine

__all__ = [
    "ClockEngine",
    "Engine",
    "RoundSettings",
    "StepEngine",
]
