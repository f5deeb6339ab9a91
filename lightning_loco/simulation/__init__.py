"""The simulation of N workers in one process, on a virtual clock, without process groups."""

from lightning_loco._util.goodput import Goodput
from lightning_loco.simulation.failures import Failure, random_failures
from lightning_loco.simulation.goodput import MergeSummary
from lightning_loco.simulation.simulation import SimulatedSettings, Simulation
from lightning_loco.simulation.timeline import LossPoint, TimelineEvent, WorkerCosts

__all__ = [
    "Failure",
    "Goodput",
    "LossPoint",
    "MergeSummary",
    "SimulatedSettings",
    "Simulation",
    "TimelineEvent",
    "WorkerCosts",
    "random_failures",
]
