"""Low-communication distributed training for PyTorch Lightning.

>>> import lightning_loco as loco
>>> strategy = loco.DiLoCoStrategy(sync_every=50)

``import lightning_loco`` also registers the strategies by name: ``Trainer(strategy="gasloc")``.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_loco.__about__ import __version__

if TYPE_CHECKING:
    from lightning_loco.algorithms import (
        SPARTA,
        Algorithm,
        DecoupledDiLoCo,
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
        DecoupledDiLoCoStrategy,
        DecoupledModelParallelStrategy,
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
    )
    from lightning_loco.syncer import LearnerEngine
    from lightning_loco.topology import Topology, get_topology

__all__ = [
    "Algorithm",
    "AsyncDiLoCoStrategy",
    "AsyncModelAverageStrategy",
    "ClockEngine",
    "CommunicationMonitor",
    "ConsensusMonitor",
    "DecoupledDiLoCo",
    "DecoupledDiLoCoStrategy",
    "DecoupledModelParallelStrategy",
    "DelayedNesterov",
    "DelayedNesterovStrategy",
    "DiLoCo",
    "DiLoCoStrategy",
    "EagerDiLoCo",
    "EagerDiLoCoStrategy",
    "Elastic",
    "GASLoC",
    "GASLoCStrategy",
    "LearnerEngine",
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

_PACKAGES = (
    "algorithms",
    "callbacks",
    "costs",
    "elastic",
    "engine",
    "gossip",
    "parameter_server",
    "simulation",
    "strategies",
    "syncer",
    "topology",
)
"""Packages that define the public names."""


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used (PEP 562)."""
        if name in __all__:
            for package in _PACKAGES:
                module = import_module(f"{__name__}.{package}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


# Lightning finds strategies by name in a registry that it fills when it is imported; it has no hook
# for other packages. So PyTorch and Lightning are imported here, except for commands that do
# without them.
if os.environ.get("LIGHTNING_LOCO_LAZY") != str(os.getpid()):
    import_module("lightning_loco.strategies.registry").register_strategies()
    import_module("lightning_loco.integrations.fabric").register_strategies()
