"""How bytes move and when: flat buffers, groups, exchanges, and the engine that makes rounds."""

from lightning_loco.comm.clock_engine import ClockEngine
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.pairwise_engine import PairwiseEngine
from lightning_loco.comm.settings import RoundSettings
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.step_engine import StepEngine

__all__ = [
    "ClockEngine",
    "PairwiseEngine",
    "RoundSettings",
    "Statistics",
    "StepEngine",
    "WorkerGroup",
]
