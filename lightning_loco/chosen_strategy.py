"""The strategy that a configuration chooses."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable

import hydra
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from lightning_loco.checked_settings import check_takes_topology, codec_of, settings_of
from lightning_loco.strategies.base import EngineStrategy

log = logging.getLogger(__name__)

OPTIONAL_PARTS = {
    "membership": "cannot let workers come and go. Drop {group}=..., or choose algorithm=diloco, "
    "async_diloco, streaming_diloco, local_sgd, gasloc or noloco.",
    "link": "makes no rounds or fetches that a link could delay. Drop {group}=..., or choose "
    "another algorithm than ddp and remote_optimizer.",
    "compression": "has no messages to compress. Drop {group}=..., or choose another algorithm "
    "than ddp.",
}


def build_strategy(cfg: DictConfig) -> Strategy:
    """The strategy of the ``algorithm`` group, with what other groups choose."""
    with settings_of("topology"):
        topology = hydra.utils.instantiate(cfg.topology) if cfg.topology._target_ else None
    with settings_of("algorithm"):
        # Partial, because Hydra would turn the topology, a dataclass, into a configuration.
        make: Callable[..., Strategy] = hydra.utils.instantiate(cfg.algorithm, _partial_=True)
        kind = hydra.utils.get_class(cfg.algorithm._target_)
        for group, instead in OPTIONAL_PARTS.items():
            if cfg[group]._target_:
                make = with_part(make, kind, group, cfg[group], instead)
        accepted = inspect.signature(kind).parameters.get("topology")
        if topology is not None:
            check_takes_topology(kind.__name__, accepted is not None, topology)
            return make(topology=topology)
        strategy = make()
        if accepted is not None and isinstance(accepted.default, str):
            log.info("No topology chosen: %s uses a %s.", kind.__name__, accepted.default)
        elif isinstance(strategy, EngineStrategy) and (
            strategy.settings.algorithm.exchange == "neighbors"
        ):
            log.info("No topology chosen: %s uses that of its algorithm.", kind.__name__)
        return strategy


def with_part(
    make: Callable[..., Strategy], kind: type, group: str, part: DictConfig, instead: str
) -> Callable[..., Strategy]:
    """A constructor of the strategy with the choice of a group; ``instead`` says who takes one."""
    if group not in inspect.signature(kind).parameters:
        name = kind.__name__.removesuffix("Strategy")
        raise ValueError(f"{name} {instead.format(group=group)}")
    with settings_of(group):
        made = codec_of(part) if group == "compression" else hydra.utils.instantiate(part)
    return functools.partial(make, **{group: made})
