"""Gossip among any number of workers: whether a topology and an algorithm are made for it."""

from __future__ import annotations

import warnings

from lightning_loco.algorithms import Algorithm
from lightning_loco.topology import TOPOLOGIES, Topology, get_topology

TYPICAL = 8
"""The number of workers that ``"auto"`` settings are chosen for, unless others need less."""

LARGEST = 32
"""Up to so many workers are checked; there may be more."""


def prepare_for_any_number(algorithm: Algorithm, topology: Topology) -> Algorithm:
    """Check an algorithm for 1 to 32 workers; ``"auto"`` becomes what suits 8 of them.

    If gossip then diverges with another number of workers, it becomes what suits that number.

    Args:
        algorithm: One that exchanges with neighbours.
        topology: Built anew whenever the number of members changes.

    Raises:
        ValueError: If the topology does not exist for one of these numbers, with those that do, or
            if the algorithm does not work with one of them.
    """
    if (missing := _why_not_always(topology)) is not None:
        raise ValueError(
            "Where workers come and go, the topology must exist for any number of them. "
            f"{missing} Those that do: {', '.join(for_any_number())}."
        ) from missing
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready = algorithm.prepare(TYPICAL, topology)
        numbers = range(1, LARGEST + 1)
        if diverging := next((n for n in numbers if not _works(ready, n, topology)), None):
            ready = algorithm.prepare(diverging, topology)
        for count in numbers:
            ready.prepare(count, topology)
    if said:
        warnings.warn(said[0].message, stacklevel=2)
    return ready


def _works(ready: Algorithm, num_workers: int, topology: Topology) -> bool:
    try:
        ready.prepare(num_workers, topology)
    except ValueError:
        return False
    return True


def for_any_number() -> list[str]:
    """The names of the topologies that exist for any number of workers."""
    return [name for name in TOPOLOGIES if _why_not_always(get_topology(name)) is None]


def _why_not_always(topology: Topology) -> ValueError | None:
    """What is wrong with the first number of workers that a topology does not exist for."""
    try:
        for count in range(1, LARGEST + 1):
            topology.check_num_workers(count)
    except ValueError as error:
        return error
    return None
