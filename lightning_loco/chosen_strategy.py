"""The strategy that a configuration chooses, and errors that say which setting is wrong."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator

import hydra
from hydra.errors import HydraException
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_loco.codecs import Codec, Compensated, ErrorFeedback
from lightning_loco.strategies.engine_strategy import EngineStrategy

log = logging.getLogger(__name__)

OPTIONAL_PARTS = {
    "membership": "cannot let workers come and go. Drop {group}=..., or choose algorithm=diloco, "
    "async_diloco, streaming_diloco, local_sgd, gasloc or noloco.",
    "link": "makes no rounds or fetches that a link could delay. Drop {group}=..., or choose "
    "another algorithm than ddp and remote_optimizer.",
    "compression": "has no messages to compress. Drop {group}=..., or choose another algorithm "
    "than ddp.",
}
SETTING_FAULTS = (
    ValueError,
    TypeError,
    ImportError,
    OSError,
    MisconfigurationException,
    HydraException,
    OmegaConfBaseException,
)


class SettingsError(ValueError):
    """A setting that cannot work. The text is one line for the user."""


@contextlib.contextmanager
def settings_of(key: str) -> Iterator[None]:
    """Turn what goes wrong while ``key`` is being built into one line that names it."""
    try:
        yield
    except SettingsError:
        raise
    except MissingMandatoryValue as error:
        missing = error.full_key or key
        raise SettingsError(f"{missing} has no value. Add {missing}=VALUE.") from error
    except SETTING_FAULTS as error:
        raise SettingsError(f"{key}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The text of an error, or of its cause where Hydra has wrapped it, on one line."""
    if isinstance(error, HydraException) and error.__cause__ is not None:
        return one_line(error.__cause__)
    return " ".join(str(error).split()) or type(error).__name__


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
        if topology is not None and accepted is None:
            raise ValueError(
                f"{kind.__name__.removesuffix('Strategy')} averages over all workers and takes no"
                f" topology, got {topology.name!r}. Drop topology=..., or choose algorithm=gasloc."
            )
        if topology is not None:
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


def codec_of(compression: DictConfig) -> Codec | ErrorFeedback | Compensated:
    """The codec of a configuration, with an error feedback if it says how much or where."""
    settings = {key: value for key, value in compression.items() if key != "error_feedback"}
    codec: Codec = hydra.utils.instantiate(settings)
    feedback = compression.error_feedback
    if feedback == "model":
        return Compensated(codec)
    return codec if feedback is None else ErrorFeedback(codec, feedback)
