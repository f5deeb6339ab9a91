"""The optimizer on another rank: workers send gradients and receive parameters."""

from lightning_loco.parameter_server.optimizer import RemoteOptimizer
from lightning_loco.parameter_server.participant import RemoteParticipant
from lightning_loco.parameter_server.protocol import Transport
from lightning_loco.parameter_server.roles import Role, Serving, Tiers, run_role, serve

__all__ = [
    "RemoteOptimizer",
    "RemoteParticipant",
    "Role",
    "Serving",
    "Tiers",
    "Transport",
    "run_role",
    "serve",
]
