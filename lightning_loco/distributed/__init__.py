"""Workers that find each other, wait for each other and fail together."""

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup

__all__ = ["Statistics", "WorkerGroup"]
