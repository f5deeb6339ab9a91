"""Lightning strategies: hooks, process groups, checkpoints."""

from lightning_loco.strategies.async_average import AsyncModelAverageStrategy
from lightning_loco.strategies.base import LocoStrategy
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
)
from lightning_loco.strategies.pairwise import PairwiseGossipStrategy
from lightning_loco.strategies.registry import STRATEGIES, register_strategies
from lightning_loco.strategies.remote import RemoteOptimizerStrategy

__all__ = [
    "STRATEGIES",
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "DiLoCoStrategy",
    "GASLoCStrategy",
    "LocalSGDStrategy",
    "LocoStrategy",
    "PairwiseGossipStrategy",
    "RemoteOptimizerStrategy",
    "register_strategies",
]
