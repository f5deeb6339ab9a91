"""The optimizer on another rank: workers send gradients and receive parameters."""

from lightning_loco.remote.optimizer import RemoteOptimizer
from lightning_loco.remote.roles import Serving, run_role, serve
from lightning_loco.remote.tiers import Role, Tiers
from lightning_loco.remote.wire import Transport

__all__ = [
    "RemoteOptimizer",
    "Role",
    "Serving",
    "Tiers",
    "Transport",
    "run_role",
    "serve",
]
