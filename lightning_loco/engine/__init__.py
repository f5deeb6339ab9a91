"""Rounds by a schedule: how messages move, and what is done with results."""

from lightning_loco.engine.clock_engine import ClockEngine
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.resume import resume_from
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.engine.step_engine import StepEngine

__all__ = [
    "ClockEngine",
    "Engine",
    "RoundSettings",
    "StepEngine",
    "resume_from",
]
