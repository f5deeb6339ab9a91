"""The optimizer on another rank: workers send gradients and receive parameters."""

from lightning_loco.remote.optimizer import RemoteOptimizer
from lightning_loco.remote.roles import (
    aggregator,
    aggregator_optimizer,
    optimizer,
    run_role,
    worker,
)
from lightning_loco.remote.site import Serving
from lightning_loco.remote.tiers import Role, Tiers
from lightning_loco.remote.transport import Transport

__all__ = [
    "RemoteOptimizer",
    "Role",
    "Serving",
    "Tiers",
    "Transport",
    "aggregator",
    "aggregator_optimizer",
    "optimizer",
    "run_role",
    "worker",
]
