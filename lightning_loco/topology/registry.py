"""Topologies by name, and conversion of a name, file, graph or matrix to a topology."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx  # type: ignore[import-untyped]

from lightning_loco._util.text import suggestion
from lightning_loco.topology.custom import FromFile, FromGraph, FromMatrix
from lightning_loco.topology.exponential import Exponential, OnePeerExponential
from lightning_loco.topology.matchings import RandomMatching, RandomTopology, RandomTwoPeer, Xor
from lightning_loco.topology.static import Complete, Grid, Hypercube, Ring, Star, Torus
from lightning_loco.topology.topology import Topology

TOPOLOGIES: dict[str, type[Topology]] = {
    kind.name: kind
    for kind in (
        Ring,
        Complete,
        Star,
        Torus,
        Grid,
        Hypercube,
        Exponential,
        OnePeerExponential,
        Xor,
        RandomMatching,
        RandomTwoPeer,
    )
}
"""The topologies by name."""


def get_topology(name: str, seed: int = 0) -> Topology:
    """Return the topology called ``name``, with its default settings.

    Args:
        name: One of :data:`TOPOLOGIES`.
        seed: Of a random topology; the others need none.

    Raises:
        ValueError: If no topology has this name; the message lists the names.

    Example:
        >>> get_topology("ring")
        Ring()
    """
    if name not in TOPOLOGIES:
        raise ValueError(_unknown(name, "Use"))
    kind = TOPOLOGIES[name]
    return kind(seed) if issubclass(kind, RandomTopology) else kind()


def as_topology(value: Any) -> Topology:
    """Convert a value to a topology.

    Args:
        value: A name, the path of an edge-list file, a networkx graph, an ``(N, N)`` mixing matrix
            (tensor, array or nested list), or a topology, which is returned unchanged.

    Raises:
        ValueError: If a string is neither a name nor a file, or a file, graph or matrix is invalid.
        TypeError: If the value is anything else.

    Example:
        >>> as_topology("star").receivers(0, 4)
        [1, 2, 3]
        >>> as_topology([[0.5, 0.5], [0.5, 0.5]]).weights(0, 2)
        {0: 0.5, 1: 0.5}
    """
    if isinstance(value, Topology):
        return value
    if isinstance(value, str) and value not in TOPOLOGIES and not Path(value).is_file():
        raise ValueError(_unknown(value, "It is not a file either. Use"))
    if isinstance(value, str):
        return get_topology(value) if value in TOPOLOGIES else FromFile(value)
    if isinstance(value, os.PathLike):
        return FromFile(value)
    if isinstance(value, nx.Graph):
        return FromGraph(value)
    if isinstance(value, Sequence) or hasattr(value, "__array__"):
        return FromMatrix(value)
    if isinstance(value, type) and issubclass(value, Topology):
        raise TypeError(
            f"A topology must be an object, got the class {value.__name__}. Write "
            f"{value.__name__}() with parentheses."
        )
    raise TypeError(
        "A topology must be a name, a Topology, a networkx graph, an (N, N) matrix or the path of "
        f"an edge-list file, got {value!r}."
    )


def _unknown(name: str, lead: str) -> str:
    instead = suggestion(name.lower().replace("-", "_"), TOPOLOGIES, "'{}'")
    return (
        f"Unknown topology '{name}'.{instead} {lead} one of {', '.join(TOPOLOGIES)}, "
        "or the path of an edge-list file."
    )
