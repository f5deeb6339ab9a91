"""Lightning strategies: hooks, process groups, checkpoints."""

from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.strategies.model_parallel import LocoModelParallelStrategy
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies.pairwise import PairwiseGossipStrategy
from lightning_loco.strategies.parameter_server import RemoteOptimizerStrategy
from lightning_loco.strategies.registry import ALGORITHM_STRATEGIES, METHODS, register_strategies

__all__ = [
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "DiLoCoStrategy",
    "EagerDiLoCoStrategy",
    "GASLoCStrategy",
    "LocalSGDStrategy",
    "LocoModelParallelStrategy",
    "LocoStrategy",
    "METHODS",
    "PairwiseGossipStrategy",
    "RemoteOptimizerStrategy",
    "StreamingDiLoCoStrategy",
    "register_strategies",
]

# Strategies that the registry makes from algorithms.
globals().update(ALGORITHM_STRATEGIES)
__all__ += sorted(ALGORITHM_STRATEGIES)
