"""Names for ``Trainer(strategy=...)``, from the table of methods."""

from __future__ import annotations

import pkgutil

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.strategies.model_parallel import LocoModelParallelStrategy

MODEL_PARALLEL = "loco_model_parallel"
"""Name of the strategy that takes a method as its argument."""

METHODS: dict[str, type[DDPStrategy]] = {
    name: pkgutil.resolve_name(row.strategy)
    for name, row in METHOD_TABLE.items()
    if row.strategy.startswith("lightning_loco.")
}
"""The strategy class of each method but Lightning's own ``ddp``."""


def register_strategies() -> None:
    """Register every strategy with Lightning once.

    Methods are also registered as ``<name>_notebook``, which starts processes with ``"fork"``, as
    Lightning's ``ddp_notebook`` does. ``loco_model_parallel`` is DiLoCo of workers that shard the
    model.
    """
    if MODEL_PARALLEL not in StrategyRegistry:
        StrategyRegistry.register(
            MODEL_PARALLEL,
            LocoModelParallelStrategy,
            description="LocoModelParallelStrategy with DiLoCoStrategy()",
        )
    for name, strategy in METHODS.items():
        for suffix, start_method in (("", "popen"), ("_notebook", "fork")):
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    strategy,
                    description=f"{strategy.__name__} with start_method {start_method!r}",
                    start_method=start_method,
                )
