"""Strings for ``Trainer(strategy="gasloc")``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_loco.strategies.async_average import AsyncModelAverageStrategy
from lightning_loco.strategies.named import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
)
from lightning_loco.strategies.pairwise import PairwiseGossipStrategy
from lightning_loco.strategies.remote import RemoteOptimizerStrategy

STRATEGIES = {
    "local_sgd": LocalSGDStrategy,
    "diloco": DiLoCoStrategy,
    "async_diloco": AsyncDiLoCoStrategy,
    "gasloc": GASLoCStrategy,
    "async_model_average": AsyncModelAverageStrategy,
    "pairwise_gossip": PairwiseGossipStrategy,
    "remote_optimizer": RemoteOptimizerStrategy,
}


def register_strategies() -> None:
    """Register every strategy, and its ``_spawn`` and ``_fork`` twins, with Lightning once."""
    for name, strategy in STRATEGIES.items():
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    strategy,
                    description=f"{strategy.__name__} with start_method {start_method!r}",
                    start_method=start_method,
                )
