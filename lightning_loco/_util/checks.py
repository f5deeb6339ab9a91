"""Checks of settings that several layers share: types, ranges, numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal


def check_bytes(name: str, value: int) -> None:
    """Raise TypeError or ValueError unless a number of bytes is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value <= 0:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")


def check_common_arguments(timeout_s: float, start_method: str) -> None:
    """Raise TypeError or ValueError for arguments that all strategies have in common."""
    check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be a number, got {timeout_s!r}.")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be positive and finite, got {timeout_s!r}.")


def check_replica_size(replica_size: object) -> None:
    """Raise TypeError or ValueError unless ``replica_size`` is a positive integer or ``"node"``."""
    if replica_size == "node":
        return
    if isinstance(replica_size, bool) or not isinstance(replica_size, int):
        raise TypeError(
            f"replica_size must be an integer, or 'node' for the ranks of a node, got "
            f"{replica_size!r}."
        )
    if replica_size < 1:
        raise ValueError(
            f"replica_size is the number of ranks of a worker and must be at least 1, got "
            f"{replica_size}."
        )


def ranks_per_worker(
    replica_size: int | Literal["node"], ranks_per_node: int, num_ranks: int
) -> int:
    """Return the number of ranks of a worker; ValueError if it does not divide all ranks.

    Example:
        >>> ranks_per_worker("node", ranks_per_node=8, num_ranks=16)
        8
    """
    size = ranks_per_node if replica_size == "node" else replica_size
    if num_ranks % size:
        raise ValueError(
            f"replica_size={size} does not divide the {num_ranks} ranks. Start a multiple of "
            f"{size} (Trainer(devices=..., num_nodes=...)), or choose a replica_size that divides "
            f"{num_ranks}."
        )
    return size


def check_parallel_sizes(data_parallel_size: Any, tensor_parallel_size: Any) -> None:
    """Raise TypeError or ValueError for sizes that a worker that shards the model cannot have."""
    for name, size in (
        ("data_parallel_size", data_parallel_size),
        ("tensor_parallel_size", tensor_parallel_size),
    ):
        if name == "data_parallel_size" and size == "auto":
            continue
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is a number of ranks and must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} is a number of ranks and must be at least 1, got {size}.")


def parallel_ranks_per_worker(
    data_parallel_size: int | Literal["auto"],
    tensor_parallel_size: int,
    ranks_per_node: int,
    num_ranks: int,
) -> int:
    """Return the number of ranks of a worker; ValueError if it does not divide all ranks.

    Example:
        >>> parallel_ranks_per_worker("auto", 2, ranks_per_node=8, num_ranks=16)
        8
    """
    data = parallel_size(data_parallel_size, tensor_parallel_size, ranks_per_node)
    size = data * tensor_parallel_size
    if num_ranks % size:
        raise ValueError(
            f"A worker has data_parallel_size={data} times tensor_parallel_size="
            f"{tensor_parallel_size} = {size} ranks, but there are {num_ranks} ranks. Start a "
            f"multiple of {size}, or give other sizes."
        )
    return size


def parallel_size(
    data_parallel_size: int | Literal["auto"], tensor_parallel_size: int, ranks_per_node: int
) -> int:
    """Return ``data_parallel_size``; for ``"auto"``, such that a worker is a node."""
    if data_parallel_size == "auto":
        return max(1, ranks_per_node // tensor_parallel_size)
    return data_parallel_size


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError, which lists the allowed values, if a value is not one of them."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
