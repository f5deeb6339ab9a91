"""Builds the strategy that a configuration names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import hydra
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from lightning_loco.app.early_checks import (
    check_takes_topology,
    codec_of,
    errors_for,
    inner_sizes,
)
from lightning_loco.strategies import (
    DecoupledDiLoCoStrategy,
    DecoupledModelParallelStrategy,
    LocoModelParallelStrategy,
    LocoStrategy,
)
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.engine_strategy import EngineStrategy

log = logging.getLogger(__name__)

OPTIONAL_GROUPS = {
    "membership": "does not let workers join and leave. Drop {group}=..., or choose "
    "algorithm=diloco, async_diloco, streaming_diloco, delayed_nesterov or local_sgd.",
    "link": "runs no rounds or fetches that a link could delay. Drop {group}=..., or choose "
    "another algorithm than ddp and remote_optimizer.",
    "compression": "has no messages to compress. Drop {group}=..., or choose another algorithm "
    "than ddp.",
}


def build_strategy(cfg: DictConfig) -> Strategy:
    """Build the strategy of the ``algorithm`` group, with the choices of other groups."""
    strategy, sizes = build_method(cfg), inner_sizes(cfg)
    if sizes is None:
        return strategy
    with errors_for("inner"):
        if isinstance(strategy, DecoupledDiLoCoStrategy):
            return DecoupledModelParallelStrategy(strategy, *sizes)
        if isinstance(strategy, LocoStrategy):
            return LocoModelParallelStrategy(strategy, *sizes)
        name = type(strategy).__name__.removesuffix("Strategy")
        raise ValueError(
            f"{name} cannot shard the model inside a worker. Drop inner.data_parallel_size, or "
            "choose algorithm=diloco, gasloc or another one with rounds."
        )


def build_method(cfg: DictConfig) -> Strategy:
    """Build the strategy of the ``algorithm`` group, whose workers hold the whole model."""
    with errors_for("topology"):
        topology = hydra.utils.instantiate(cfg.topology) if cfg.topology._target_ else None
    with errors_for("algorithm"):
        # Partial, because Hydra would turn the topology, a dataclass, into a configuration.
        make: Callable[..., Strategy] = hydra.utils.instantiate(cfg.algorithm, _partial_=True)
        kind = hydra.utils.get_class(cfg.algorithm._target_)
        given: dict[str, Any] = {}
        for group, instead in OPTIONAL_GROUPS.items():
            if not cfg[group]._target_:
                continue
            if group not in argument_names(kind):
                name = kind.__name__.removesuffix("Strategy")
                raise ValueError(f"{name} {instead.format(group=group)}")
            with errors_for(group):
                part = cfg[group]
                made = codec_of(part) if group == "compression" else hydra.utils.instantiate(part)
                given[group] = made
        accepted = inspect.signature(kind).parameters.get("topology")
        if topology is not None:
            check_takes_topology(kind.__name__, accepted is not None, topology)
            return make(topology=topology, **given)
        strategy = make(**given)
        say = rank_zero_only(log.info)  # the other ranks build the same
        if accepted is not None and isinstance(accepted.default, str):
            say("No topology chosen: %s uses a %s.", kind.__name__, accepted.default)
        elif isinstance(strategy, EngineStrategy) and (
            strategy.settings.algorithm.exchange == "neighbors"
        ):
            say("No topology chosen: %s uses its algorithm's.", kind.__name__)
        return strategy
