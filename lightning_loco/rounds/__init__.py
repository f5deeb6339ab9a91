"""Rounds by a schedule: when workers exchange, how messages move, how results land."""

from lightning_loco.rounds.clock_engine import ClockEngine
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.landing import KeepProgress, Landing, Restart
from lightning_loco.rounds.schedule import EveryInterval, EverySteps, Now, Schedule
from lightning_loco.rounds.settings import RoundSettings
from lightning_loco.rounds.step_engine import StepEngine

__all__ = [
    "ClockEngine",
    "Engine",
    "EveryInterval",
    "EverySteps",
    "KeepProgress",
    "Landing",
    "Now",
    "Restart",
    "RoundSettings",
    "Schedule",
    "StepEngine",
]
