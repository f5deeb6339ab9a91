"""Checks of a configuration that are made before Lightning is imported, which takes long.

Everything else is checked when the strategy and the Trainer are built.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_loco._util.checks import (
    check_common_arguments,
    check_parallel_sizes,
    check_replica_size,
    parallel_ranks_per_worker,
    ranks_per_worker,
)
from lightning_loco.app.launch import follow_launcher
from lightning_loco.compression import Codec, Compensated, ErrorFeedback
from lightning_loco.costs import as_links
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.engine.settings import RoundOptions, RoundSettings
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.parameter_server.roles import Tiers, check_ranks
from lightning_loco.syncer.settings import DecoupledSettings
from lightning_loco.topology import Topology

SETTING_ERRORS = (
    ValueError,
    TypeError,
    ImportError,
    OSError,
    HydraException,
    OmegaConfBaseException,
)
IMPORTED_EARLY = tuple(
    f"lightning_loco.{part}." for part in ("algorithms", "compression", "costs", "topology")
)
"""Modules that can be imported without Lightning; users' modules may need it."""

EarlySettings = RoundSettings | PairwiseSettings | DecoupledSettings


class SettingsError(ValueError):
    """A setting that cannot work. The text is one line for the user."""


@contextlib.contextmanager
def errors_for(key: str) -> Iterator[None]:
    """A context that turns errors while ``key`` is being built into one line that names it."""
    try:
        yield
    except SettingsError:
        raise
    except MissingMandatoryValue as error:
        missing = error.full_key or key
        raise SettingsError(f"{missing} has no value. Add {missing}=VALUE.") from error
    except Exception as error:
        # Compared by name: importing the class would import all of Lightning.
        is_lightnings = type(error).__name__ == "MisconfigurationException"
        if not is_lightnings and not isinstance(error, SETTING_ERRORS):
            raise
        raise SettingsError(f"{key}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the text of an error, or of its cause if Hydra has wrapped it, on one line."""
    if isinstance(error, HydraException) and error.__cause__ is not None:
        return one_line(error.__cause__)
    return " ".join(str(error).split()) or type(error).__name__


def checked(cfg: DictConfig) -> DictConfig:
    """Adapt a configuration to the launcher; SettingsError if a value cannot work."""
    with errors_for("trainer"):
        cfg = follow_launcher(cfg)
    sizes = inner_sizes(cfg)
    if cfg.sample and sizes is not None:
        raise SettingsError(
            "sample=true generates text on one rank, which holds a shard of the model. Drop "
            "sample=true, or inner.data_parallel_size and inner.tensor_parallel_size."
        )
    settings = early_settings(cfg)
    if settings is not None and (ranks := ranks_of(cfg)) is not None:
        on_node, num_ranks = ranks[0], math.prod(ranks)
        with errors_for("inner"):
            size = 1
            if sizes is not None:
                size = parallel_ranks_per_worker(*sizes, on_node, num_ranks)
        with errors_for("algorithm"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are repeated before training
            if sizes is None:
                asked = cfg.algorithm.get("replica_size", 1)
                size = ranks_per_worker(asked, on_node, num_ranks)
            settings.prepare(num_ranks // size)
    return cfg


def inner_sizes(cfg: DictConfig) -> tuple[int | Literal["auto"], int] | None:
    """Return over how many ranks a worker shards the model, in two ways; None if it does not.

    SettingsError if a size cannot work.
    """
    data, tensor = cfg.inner.data_parallel_size, cfg.inner.tensor_parallel_size
    if data is None and tensor == 1:
        return None
    data = 1 if data is None else data
    with errors_for("inner"):
        check_parallel_sizes(data, tensor)
    return data, tensor


def ranks_of(cfg: DictConfig) -> tuple[int, int] | None:
    """Return how many ranks a node will have, and how many nodes there are.

    None if only Lightning knows it.
    """
    devices, num_nodes = cfg.trainer.get("devices"), cfg.trainer.get("num_nodes", 1)
    if type(devices) is not int or type(num_nodes) is not int or devices < 1 or num_nodes < 1:
        return None
    return devices, num_nodes


def early_settings(cfg: DictConfig) -> EarlySettings | None:
    """Return the settings of the strategy that a configuration names.

    None for an unknown strategy, or settings that cannot be made without Lightning. SettingsError
    if a value cannot work.
    """
    package, _, kind = str(cfg.algorithm.get("_target_")).rpartition(".")
    known = {row.strategy_name: row for row in METHOD_TABLE.values()}
    inner = [*cfg.algorithm.values(), cfg.topology, cfg.compression, cfg.link]
    if (
        package != "lightning_loco"
        or kind not in known
        or cfg.membership._target_
        or not all(target.startswith(IMPORTED_EARLY) for target in _targets(inner))
    ):
        return None
    row = known[kind]
    with errors_for("topology"):
        topology = hydra.utils.instantiate(cfg.topology) if cfg.topology._target_ else None
    with errors_for("algorithm"):
        arguments = {key: value for key, value in cfg.algorithm.items() if key != "_target_"}
        given = dict(hydra.utils.instantiate(arguments))
        if {"timeout_s", "start_method"} <= given.keys():
            check_common_arguments(given["timeout_s"], given["start_method"])
        if row.settings is None:
            _check_tiers(given, ranks_of(cfg))
            return None
        if "replica_size" in given:
            check_replica_size(given["replica_size"])
        if topology is not None:
            check_takes_topology(kind, "topology" in row.defaults, topology)
            given["topology"] = topology
        with errors_for("compression"):
            given["compression"] = codec_of(cfg.compression) if cfg.compression._target_ else None
        with errors_for("link"):
            link = hydra.utils.instantiate(cfg.link) if cfg.link._target_ else None
            given["link"] = as_links(link)
        make: Callable[..., EarlySettings] = pkgutil.resolve_name(row.settings)
        settings = make(**{name: given.pop(name, row.defaults[name]) for name in row.defaults})
        if isinstance(settings, RoundSettings):
            names = RoundOptions.__annotations__.keys() & given.keys()
            options: Any = {name: given[name] for name in names}
            settings = settings.with_options(**options)
        return settings


def check_takes_topology(kind: str, accepted: bool, topology: Topology) -> None:
    """Raise ValueError for a topology if the strategy does not accept one."""
    if not accepted:
        raise ValueError(
            f"{kind.removesuffix('Strategy')} has no neighbours in a graph and takes no"
            f" topology, got {topology.name!r}. Drop topology=..., or choose algorithm=gasloc."
        )


def codec_of(compression: DictConfig) -> Codec | ErrorFeedback | Compensated:
    """Return the codec of a configuration, with error feedback if it is configured."""
    settings = {key: value for key, value in compression.items() if key != "error_feedback"}
    codec: Codec = hydra.utils.instantiate(settings)
    feedback = compression.error_feedback
    if feedback == "model":
        return Compensated(codec)
    return codec if feedback is None else ErrorFeedback(codec, feedback)


def _check_tiers(given: Mapping[str, Any], ranks: tuple[int, int] | None) -> None:
    """Raise ValueError for numbers of ranks that a remote optimizer cannot work with."""
    if given.keys() >= set(inspect.signature(check_ranks).parameters):
        check_ranks(**{name: given[name] for name in inspect.signature(check_ranks).parameters})
        if ranks is not None:
            counts = given["num_workers"], given["num_servers"], given["replica_size"]
            Tiers.detect(math.prod(ranks), *counts)


def _targets(node: Any) -> Iterator[str]:
    """Yield the classes that a part of a configuration names, at any depth."""
    if OmegaConf.is_dict(node):
        if target := node.get("_target_"):
            yield str(target)
        node = [node[key] for key in node if not OmegaConf.is_missing(node, key)]
    if OmegaConf.is_list(node) or isinstance(node, list):
        for value in node:
            yield from _targets(value)
