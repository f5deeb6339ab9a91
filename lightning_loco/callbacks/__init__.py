"""Lightning callbacks: metrics of communication and consensus, logs of all workers, delays."""

from lightning_loco.callbacks.monitor import CommunicationMonitor, ConsensusMonitor, PeerMonitor
from lightning_loco.callbacks.straggler import StragglerSimulator
from lightning_loco.callbacks.worker_logs import WorkerLogs

__all__ = [
    "CommunicationMonitor",
    "ConsensusMonitor",
    "PeerMonitor",
    "StragglerSimulator",
    "WorkerLogs",
]
