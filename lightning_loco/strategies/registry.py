"""The table of methods: a name for ``Trainer(strategy="gasloc")`` and ``algorithm=gasloc`` each."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_loco.strategies.async_average import AsyncModelAverageStrategy
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies.of_algorithm import AlgorithmStrategy, of_algorithm
from lightning_loco.strategies.pairwise import PairwiseGossipStrategy
from lightning_loco.strategies.remote import RemoteOptimizerStrategy

__all__ = ["MADE", "METHODS", "of_algorithm", "register_strategies"]

# The name is also that of the file in conf/algorithm/. An algorithm that needs no strategy of its
# own is one line: "noloco": of_algorithm("lightning_loco.algorithms.noloco", "NoLoCo").
METHODS: dict[str, type[DDPStrategy]] = {
    "local_sgd": LocalSGDStrategy,
    "diloco": DiLoCoStrategy,
    "async_diloco": AsyncDiLoCoStrategy,
    "streaming_diloco": StreamingDiLoCoStrategy,
    "eager_diloco": EagerDiLoCoStrategy,
    "delayed_nesterov": of_algorithm(
        "lightning_loco.algorithms.delayed_nesterov", "DelayedNesterov"
    ),
    "gasloc": GASLoCStrategy,
    "noloco": of_algorithm("lightning_loco.algorithms.noloco", "NoLoCo"),
    "async_model_average": AsyncModelAverageStrategy,
    "pairwise_gossip": PairwiseGossipStrategy,
    "remote_optimizer": RemoteOptimizerStrategy,
}

# What of_algorithm has made, by the names that the package exports.
MADE = {
    strategy.__name__: strategy
    for strategy in METHODS.values()
    if issubclass(strategy, AlgorithmStrategy)
}


def register_strategies() -> None:
    """Register every strategy, and its ``_spawn`` and ``_fork`` twins, with Lightning once."""
    for name, strategy in METHODS.items():
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    strategy,
                    description=f"{strategy.__name__} with start_method {start_method!r}",
                    start_method=start_method,
                )
