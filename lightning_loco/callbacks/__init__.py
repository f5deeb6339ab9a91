"""Lightning callbacks: metrics, logs of all workers, delays, pauses, the page of a run."""

from lightning_loco.callbacks.monitors import CommunicationMonitor, ConsensusMonitor, PeerMonitor
from lightning_loco.callbacks.pause_averaging import PauseAveraging
from lightning_loco.callbacks.report_callback import ReportCallback
from lightning_loco.callbacks.straggler import StragglerSimulator
from lightning_loco.callbacks.worker_logs import WorkerLogs

__all__ = [
    "CommunicationMonitor",
    "ConsensusMonitor",
    "PauseAveraging",
    "PeerMonitor",
    "ReportCallback",
    "StragglerSimulator",
    "WorkerLogs",
]
