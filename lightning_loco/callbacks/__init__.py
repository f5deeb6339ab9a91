"""Lightning callbacks: what communication costs, how far the workers are apart, and delays."""

from lightning_loco.callbacks.communication import CommunicationMonitor
from lightning_loco.callbacks.consensus import ConsensusMonitor
from lightning_loco.callbacks.peers import PeerMonitor
from lightning_loco.callbacks.straggler import StragglerSimulator
from lightning_loco.callbacks.worker_logs import WorkerLogs

__all__ = [
    "CommunicationMonitor",
    "ConsensusMonitor",
    "PeerMonitor",
    "StragglerSimulator",
    "WorkerLogs",
]
