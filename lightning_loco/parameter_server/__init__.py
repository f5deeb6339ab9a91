"""The optimizer on another rank: workers send gradients and receive parameters."""

from lightning_loco.parameter_server.optimizer import RemoteOptimizer
from lightning_loco.parameter_server.protocol import Transport
from lightning_loco.parameter_server.roles import Serving, run_role, serve
from lightning_loco.parameter_server.tiers import Role, Tiers

__all__ = [
    "RemoteOptimizer",
    "Role",
    "Serving",
    "Tiers",
    "Transport",
    "run_role",
    "serve",
]
