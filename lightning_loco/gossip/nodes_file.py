"""Reads peers and settings from a YAML file in the format of dpwa."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from lightning_loco._util.user_files import MAX_ERROR, read_yaml
from lightning_loco.gossip.peer_selection import Peer, as_peers

_WITHOUT_SETTINGS = ("clock", "loss")
_KEYS = (
    "nodes",
    "fetch_probability",
    "timeout_ms",
    "interpolation",
    "divergence_threshold",
    "constant",
    *_WITHOUT_SETTINGS,
)


class NodeSettings(TypedDict, total=False):
    """Settings of pairwise averaging. A key that is not in the file is missing."""

    fetch_probability: float
    fetch_timeout_s: float
    interpolation: Literal["constant", "clock", "loss"]
    divergence_threshold: float
    factor: float


def read_nodes(path: str | Path) -> tuple[list[Peer], NodeSettings]:
    """Read a nodes file: a list of mappings with one key each, or one mapping with all keys.

    For example::

        - nodes:
            - {name: a, host: 10.0.0.1, port: 45000}
            - {name: b, host: 10.0.0.2, port: 45000}
        - fetch_probability: 1.0
        - timeout_ms: 2500
        - interpolation: constant
        - divergence_threshold: 0.2
        - constant: {value: 0.5}
        - clock: 0  # no settings, like loss

    Returns:
        The peers, and the settings under the names of the arguments of
        :class:`~lightning_loco.algorithms.pairwise_average.PairwiseAverage` and
        :class:`~lightning_loco.gossip.PeerNode`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it cannot be read, a key is unknown or repeated, or a value is invalid.
    """
    try:
        content = read_yaml(path, "nodes file")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no nodes file {str(path)!r}. Pass the path of an existing one."
        ) from None
    try:
        merged = _merge(content)
        nodes = merged.get("nodes")
        if not isinstance(nodes, list) or not nodes:
            raise ValueError("'nodes' must be a list with name, host and port for every peer.")
        return as_peers(nodes), _settings(merged)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r}: {str(error)[:MAX_ERROR]}") from None


def _merge(content: object) -> dict[str, Any]:
    """Merge a list of mappings into one."""
    mappings = content if isinstance(content, list) else [content]
    merged: dict[str, Any] = {}
    for entry in mappings:
        if not isinstance(entry, Mapping):
            raise ValueError(f"Expected a mapping or a list of mappings, got {entry!r}.")
        for key, value in entry.items():
            if key not in _KEYS:
                raise ValueError(f"Unknown key {key!r}. Use {', '.join(_KEYS)}.")
            if key in merged:
                raise ValueError(f"The key {key!r} is given twice. Remove one of them.")
            merged[key] = value
    return merged


def _settings(merged: dict[str, Any]) -> NodeSettings:
    settings = NodeSettings()
    if "fetch_probability" in merged:
        settings["fetch_probability"] = _number(merged, "fetch_probability")
    if "timeout_ms" in merged:
        settings["fetch_timeout_s"] = _number(merged, "timeout_ms") / 1000
    if "divergence_threshold" in merged:
        settings["divergence_threshold"] = _number(merged, "divergence_threshold")
    if "interpolation" in merged:
        settings["interpolation"] = merged["interpolation"]
        if not isinstance(settings["interpolation"], str):
            raise ValueError(f"interpolation must be a name, got {settings['interpolation']!r}.")
    if "constant" in merged:
        constant = merged["constant"]
        if not isinstance(constant, Mapping) or set(constant) != {"value"}:
            raise ValueError(f"'constant' has the form {{value: 0.5}}, got {constant!r}.")
        settings["factor"] = _number(constant, "value")
    for key in _WITHOUT_SETTINGS:
        if merged.get(key):
            raise ValueError(f"{key!r} has no settings, got {merged[key]!r}. Write {key}: 0.")
    return settings


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key!r} must be a number, got {value!r}.")
    return float(value)
