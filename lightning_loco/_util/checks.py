"""Values of settings: checks of types and ranges, a plain form; bytes and seconds as text."""

from __future__ import annotations

import dataclasses
import functools
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
    replica_size: int | Literal["node"], ranks_per_node: int, num_nodes: int
) -> int:
    """Return the number of ranks of a worker; ValueError if it does not divide that of all.

    Example:
        >>> ranks_per_worker("node", ranks_per_node=8, num_nodes=2)
        8
    """
    size = ranks_per_node if replica_size == "node" else replica_size
    num_ranks = ranks_per_node * num_nodes
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
    num_nodes: int,
) -> int:
    """Return the number of ranks of a worker; ValueError if it does not divide that of all.

    Example:
        >>> parallel_ranks_per_worker("auto", 2, ranks_per_node=8, num_nodes=2)
        8
    """
    data = parallel_size(data_parallel_size, tensor_parallel_size, ranks_per_node)
    size, num_ranks = data * tensor_parallel_size, ranks_per_node * num_nodes
    if num_ranks % size:
        raise ValueError(
            f"data_parallel_size={data} times tensor_parallel_size={tensor_parallel_size} are the "
            f"ranks of a worker, and the {num_ranks} ranks are no multiple of {size}. Start a "
            "multiple of it, or give other sizes."
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


ADDED_LATER = {"added_later": True}
"""Metadata of a dataclass field that earlier checkpoints do not have: :func:`plain` leaves it out
if it has its default."""


def plain(value: Any) -> Any:
    """Convert a setting to numbers, strings, lists and dictionaries that can be compared.

    Functions are compared by module and name only: two lambdas of one module are equal, whatever
    they compute. Use ``functools.partial`` for arguments that shall be compared.

    Example:
        >>> plain(functools.partial(max, key=3))
        ['partial', 'builtins.max', [], {'key': 3}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return ["partial", plain(value.func), plain(value.args), plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.metadata != ADDED_LATER or getattr(value, field.name) != field.default
        }
        return [type(value).__qualname__, plain(fields)]
    has_own_text = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    return repr(value) if has_own_text else [type(value).__qualname__, plain(vars(value))]


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a decimal unit, such as 12.3 MB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.{0 if unit == 'B' else 1}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration: minutes from 3 min on, hours from 3 h on, days from 3 d on.

    Example:
        >>> [format_seconds(seconds) for seconds in (0.0123, 0.5, 12.34, 179)]
        ['12.3 ms', '0.5 s', '12.3 s', '179 s']
        >>> [format_seconds(seconds) for seconds in (245, 9000, 40_000, 1e6)]
        ['4.1 min', '150.0 min', '11.1 h', '11.6 d']
    """
    for factor, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 3 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"
