"""The ranks of a job: rendezvous, key-value store, process groups, watchdog, statistics."""

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup

__all__ = ["Statistics", "WorkerGroup"]
