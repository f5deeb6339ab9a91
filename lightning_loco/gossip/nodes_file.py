"""Lists of peers and their settings in a YAML file, in the form that dpwa uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import yaml  # type: ignore[import-untyped]

from lightning_loco.gossip.peer_selection import Peer, as_peer

_KEYS = (
    "nodes",
    "fetch_probability",
    "timeout_ms",
    "interpolation",
    "divergence_threshold",
    "constant",
)


class NodeSettings(TypedDict, total=False):
    """Settings of pairwise averaging that the file names; what it does not name is missing."""

    fetch_probability: float
    fetch_timeout_s: float
    interpolation: Literal["constant", "clock", "loss"]
    divergence_threshold: float
    factor: float


def read_nodes(path: str | Path) -> tuple[list[Peer], NodeSettings]:
    """Read a file like this one, a list of maps with one key each, or one map with all keys::

        - nodes:
            - {name: a, host: 10.0.0.1, port: 45000}
            - {name: b, host: 10.0.0.2, port: 45000}
        - fetch_probability: 1.0
        - timeout_ms: 2500
        - interpolation: constant
        - divergence_threshold: 0.2
        - constant: {value: 0.5}

    Returns:
        The peers, and the settings under the names that
        :class:`~lightning_loco.algorithms.pairwise.PairwiseAverage` and
        :class:`~lightning_loco.gossip.PeerNode` have for them.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not YAML, or says something that is not understood.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no nodes file {str(path)!r}. Pass the path of one."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not YAML: {error}") from None
    try:
        found = _merge(content)
        nodes = found.get("nodes")
        if not isinstance(nodes, list) or not nodes:
            raise ValueError("'nodes' must be a list with name, host and port for every peer.")
        peers = [as_peer(node) for node in nodes]
        names = [peer.name for peer in peers]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"Doubled names: {', '.join(doubled)}. Give each node its own name.")
        return peers, _settings(found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _merge(content: object) -> dict[str, Any]:
    """One map out of a list of maps."""
    maps = content if isinstance(content, list) else [content]
    found: dict[str, Any] = {}
    for entry in maps:
        if not isinstance(entry, Mapping):
            raise ValueError(f"Expected a map or a list of maps, got {entry!r}.")
        for key, value in entry.items():
            if key not in _KEYS:
                raise ValueError(f"Unknown key {key!r}. Use {', '.join(_KEYS)}.")
            if key in found:
                raise ValueError(f"The key {key!r} is there twice. Leave one of them.")
            found[key] = value
    return found


def _settings(found: dict[str, Any]) -> NodeSettings:
    settings = NodeSettings()
    if "fetch_probability" in found:
        settings["fetch_probability"] = _number(found, "fetch_probability")
    if "timeout_ms" in found:
        settings["fetch_timeout_s"] = _number(found, "timeout_ms") / 1000
    if "divergence_threshold" in found:
        settings["divergence_threshold"] = _number(found, "divergence_threshold")
    if "interpolation" in found:
        settings["interpolation"] = found["interpolation"]
        if not isinstance(settings["interpolation"], str):
            raise ValueError(f"interpolation must be a name, got {settings['interpolation']!r}.")
    if "constant" in found:
        constant = found["constant"]
        if not isinstance(constant, Mapping) or set(constant) != {"value"}:
            raise ValueError(f"'constant' has the form {{value: 0.5}}, got {constant!r}.")
        settings["factor"] = _number(constant, "value")
    return settings


def _number(found: Mapping[str, Any], key: str) -> float:
    value = found[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key!r} must be a number, got {value!r}.")
    return float(value)
