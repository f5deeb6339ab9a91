"""The common ground of all engines: flat buffers, groups, and what workers tell each other."""

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.worker import Worker

__all__ = ["Statistics", "Worker", "WorkerGroup"]
