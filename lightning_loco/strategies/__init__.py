"""Lightning strategies: hooks, process groups, checkpoints."""

from lightning_loco.strategies.arguments import CommonArguments, RoundArguments, WorkerArguments
from lightning_loco.strategies.decoupled_diloco import DecoupledDiLoCoStrategy
from lightning_loco.strategies.loco import LocoStrategy
from lightning_loco.strategies.model_parallel import (
    DecoupledModelParallelStrategy,
    LocoModelParallelStrategy,
)
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DelayedNesterovStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    NoLoCoStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies.pairwise_gossip import PairwiseGossipStrategy
from lightning_loco.strategies.registry import METHODS, register_strategies
from lightning_loco.strategies.remote_optimizer import RemoteOptimizerStrategy

__all__ = [
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "CommonArguments",
    "DecoupledDiLoCoStrategy",
    "DecoupledModelParallelStrategy",
    "DelayedNesterovStrategy",
    "DiLoCoStrategy",
    "EagerDiLoCoStrategy",
    "GASLoCStrategy",
    "LocalSGDStrategy",
    "LocoModelParallelStrategy",
    "LocoStrategy",
    "METHODS",
    "NoLoCoStrategy",
    "PairwiseGossipStrategy",
    "RemoteOptimizerStrategy",
    "RoundArguments",
    "SPARTAStrategy",
    "StreamingDiLoCoStrategy",
    "WorkerArguments",
    "register_strategies",
]
