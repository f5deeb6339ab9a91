"""Low-communication distributed training for PyTorch Lightning.

>>> import lightning_loco as loco
>>> strategy = loco.DiLoCoStrategy(sync_every=50)

``import lightning_loco`` also registers the strategies by name: ``Trainer(strategy="gasloc")``.
"""

from lightning_loco.__about__ import __version__
from lightning_loco.algorithms import (
    SPARTA,
    Algorithm,
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    LocalSGD,
    ModelAverage,
    NeighborAverage,
    NoLoCo,
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
from lightning_loco.costs import Link
from lightning_loco.elastic import Elastic
from lightning_loco.engine import ClockEngine, StepEngine
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.parameter_server import RemoteOptimizer
from lightning_loco.simulation import Simulation
from lightning_loco.strategies import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DelayedNesterovStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
    NoLoCoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
    register_strategies,
)
from lightning_loco.topology import Topology, get_topology

__all__ = [
    "Algorithm",
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "ClockEngine",
    "CommunicationMonitor",
    "ConsensusMonitor",
    "DelayedNesterov",
    "DelayedNesterovStrategy",
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
    "NoLoCo",
    "NoLoCoStrategy",
    "PairwiseAverage",
    "PairwiseEngine",
    "PairwiseGossipStrategy",
    "PauseAveraging",
    "PeerMonitor",
    "RemoteOptimizer",
    "RemoteOptimizerStrategy",
    "ReportCallback",
    "SPARTA",
    "SPARTAStrategy",
    "Simulation",
    "StepEngine",
    "StragglerSimulator",
    "StreamingDiLoCoStrategy",
    "Topology",
    "WorkerLogs",
    "__version__",
    "get_topology",
]

register_strategies()
