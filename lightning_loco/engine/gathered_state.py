"""The state of a worker of several ranks: gathered from the parts of its ranks, and cut into them.

An engine has the outer state, the residuals and the pending messages of the elements that its rank
owns. A whole state has all elements, like the state of a worker of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_loco.model.replica import Replica

_Convert = Callable[[Any, int | None], Any]
"""Converts one vector, given the fragment to which it belongs; None for all parameters."""


def gather_state(state: dict[str, Any], replica: Replica) -> dict[str, Any] | None:
    """Return the whole state on the worker's first rank, in the host's memory; None on others.

    All ranks of the worker must call it. A worker of one rank gets its state unchanged.

    Args:
        state: Result of ``Engine.state_dict``, with or without the entry ``"shared"``.
        replica: The engine's.

    Raises:
        ValueError: If a rank of the worker holds a shard of the parameters.
        RuntimeError: If a rank is missing or has failed; the message names it.
    """
    if (vectors := replica.vectors) is None:
        return state
    gathered = with_vectors(state, of_length(replica.layout.numel), vectors.gather)
    return gathered if vectors.is_receiver else None


def own_state(whole: dict[str, Any], replica: Replica) -> dict[str, Any]:
    """Return this rank's part of a whole state, for ``Engine.load_state_dict``.

    ValueError if a rank of the worker holds a shard of the parameters.
    """
    if (vectors := replica.vectors) is None:
        return whole
    return with_vectors(whole, of_length(replica.layout.num_held), vectors.cut)


def whole_length(fragment: int, replica: Replica) -> int:
    """Return the length of a round's result for a fragment of the whole worker."""
    if (vectors := replica.vectors) is None:
        return sum(map(len, replica.fragments[fragment]))
    return vectors.length(fragment)


def of_length(numel: int) -> Callable[[Any, int | None], bool]:
    """Return whether a value is a vector; one of all parameters has the shape ``(numel,)``."""

    def is_vector(value: Any, fragment: int | None) -> bool:
        return isinstance(value, Tensor) and (fragment is not None or value.shape == (numel,))

    return is_vector


def with_vectors(
    state: dict[str, Any], is_vector: Callable[[Any, int | None], bool], convert: _Convert
) -> dict[str, Any]:
    """Return a state with other vectors; fragments share the same entries as before.

    Args:
        state: Of an engine, with or without the entry ``"shared"``; without ``"fragments"`` if
            the engine has no rounds.
        is_vector: Whether a value is a vector, given the fragment to which it belongs if it is one.
        convert: Returns the vector that replaces it.
    """
    found: dict[int, Any] = {}

    def vector(value: Any, fragment: int | None = None) -> Any:
        if not is_vector(value, fragment):
            return value
        if id(value) not in found:
            found[id(value)] = convert(value, fragment)
        return found[id(value)]

    def vectors(entries: dict[str, Any]) -> dict[str, Any]:
        return {name: vector(value) for name, value in entries.items()}

    def shared(index: int, entry: dict[str, Any]) -> dict[str, Any]:
        return {"state": vectors(entry["state"]), "received": vector(entry["received"], index)}

    def own(index: int, entry: dict[str, Any]) -> dict[str, Any]:
        pending = entry["pending"]
        if pending is not None and "messages" in pending:
            pending = {**pending, "messages": vector(pending["messages"], index)}
        return {
            "pending": pending,
            "residual": vectors(entry["residual"]),
            "sent_params": vector(entry["sent_params"]),
        }

    converted = dict(state)
    if "fragments" in state:
        converted["fragments"] = [own(*pair) for pair in enumerate(state["fragments"])]
    if "shared" in state:
        converted["shared"] = [shared(*pair) for pair in enumerate(state["shared"])]
    return converted
