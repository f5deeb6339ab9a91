"""Low-communication distributed training for PyTorch Lightning.

>>> import lightning_loco as loco
>>> strategy = loco.DiLoCoStrategy(sync_every=50)

``import lightning_loco`` also registers the strategies by name: ``Trainer(strategy="gasloc")``.
"""

from typing import TYPE_CHECKING, Any

from lightning_loco.__about__ import __version__
from lightning_loco.algorithms import (
    Algorithm,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    LocalSGD,
    ModelAverage,
    NeighborAverage,
    PairwiseAverage,
)
from lightning_loco.callbacks import (
    CommunicationMonitor,
    ConsensusMonitor,
    PauseAveraging,
    PeerMonitor,
    ReportCallback,
    StragglerSimulator,
    WorkerLogs,
)
from lightning_loco.elastic import Elastic
from lightning_loco.engine import ClockEngine, StepEngine
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.links import Link
from lightning_loco.parameter_server import RemoteOptimizer
from lightning_loco.simulation import Simulation
from lightning_loco.strategies import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    StreamingDiLoCoStrategy,
    register_strategies,
)
from lightning_loco.strategies.registry import ALGORITHM_STRATEGIES
from lightning_loco.topology import Topology, get_topology

__all__ = [
    "Algorithm",
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "ClockEngine",
    "CommunicationMonitor",
    "ConsensusMonitor",
    "DiLoCo",
    "DiLoCoStrategy",
    "EagerDiLoCo",
    "EagerDiLoCoStrategy",
    "Elastic",
    "GASLoC",
    "GASLoCStrategy",
    "Link",
    "LocalSGD",
    "LocalSGDStrategy",
    "LocoModelParallelStrategy",
    "LocoStrategy",
    "ModelAverage",
    "NeighborAverage",
    "PairwiseAverage",
    "PairwiseEngine",
    "PairwiseGossipStrategy",
    "PauseAveraging",
    "PeerMonitor",
    "RemoteOptimizer",
    "RemoteOptimizerStrategy",
    "ReportCallback",
    "Simulation",
    "StepEngine",
    "StragglerSimulator",
    "StreamingDiLoCoStrategy",
    "Topology",
    "WorkerLogs",
    "__version__",
    "get_topology",
]

# Strategies that the registry makes from algorithms, and these algorithms.
_generated = {
    kind.__name__: kind
    for strategy in ALGORITHM_STRATEGIES.values()
    for kind in (strategy, strategy.algorithm_type)
}
globals().update(_generated)
__all__ += sorted(_generated.keys() - set(__all__))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the generated ones


register_strategies()
