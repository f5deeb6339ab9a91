"""The optimizer on another rank: workers send gradients and receive parameters."""

from lightning_loco.comm.remote.optimizer import RemoteOptimizer
from lightning_loco.comm.remote.servers import aggregator, aggregator_optimizer, optimizer
from lightning_loco.comm.remote.tiers import Role, Tiers

__all__ = [
    "RemoteOptimizer",
    "Role",
    "Tiers",
    "aggregator",
    "aggregator_optimizer",
    "optimizer",
]
