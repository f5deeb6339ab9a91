"""Rounds by a schedule: how messages move, and what is done with results."""

from lightning_loco.rounds.carried_over import carry_over
from lightning_loco.rounds.clock_engine import ClockEngine
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.settings import RoundSettings
from lightning_loco.rounds.step_engine import StepEngine

__all__ = [
    "ClockEngine",
    "Engine",
    "RoundSettings",
    "StepEngine",
    "carry_over",
]
