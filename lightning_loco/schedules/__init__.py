"""When rounds begin and end: settings and numbers only, asked after every local step."""

from lightning_loco.schedules.base import Now, Schedule
from lightning_loco.schedules.every_interval import EveryInterval
from lightning_loco.schedules.every_steps import EverySteps
from lightning_loco.schedules.staggered import Staggered

__all__ = ["EveryInterval", "EverySteps", "Now", "Schedule", "Staggered"]
