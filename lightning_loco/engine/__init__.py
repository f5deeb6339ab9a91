"""Rounds by a schedule: one engine counts local steps, its fragments exchange and update."""

from lightning_loco.engine.constructors import ClockEngine, StepEngine
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.resume import resume_from
from lightning_loco.engine.settings import RoundSettings

__all__ = [
    "ClockEngine",
    "Engine",
    "RoundSettings",
    "StepEngine",
    "resume_from",
]
