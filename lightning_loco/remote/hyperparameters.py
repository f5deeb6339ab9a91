"""The numbers of an optimizer that schedules change: learning rates, momenta, weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Hyperparameters = list[dict[str, Any]]
"""One entry per parameter group: name and number, truth value or list of these."""


def read_hyperparameters(groups: Sequence[dict[str, Any]]) -> Hyperparameters:
    """The numbers of parameter groups, as JSON can hold them."""
    return [
        {name: plain for name, value in group.items() if (plain := _plain(value)) is not None}
        for group in groups
    ]


def write_hyperparameters(groups: Sequence[dict[str, Any]], values: Hyperparameters) -> None:
    """Put numbers into parameter groups, in place."""
    for group, numbers in zip(groups, values, strict=True):
        for name, value in numbers.items():
            old = group.get(name)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _plain(value: object) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 and not value.is_complex() else None
    if isinstance(value, tuple) and value and all(isinstance(v, (int, float)) for v in value):
        return list(value)
    return None


class HyperparameterMirror:
    """Hyper-parameters that two ranks keep equal: whoever changes them tells the other.

    Args:
        groups: The parameter groups on this rank.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups
        self._known: Hyperparameters | None = None

    def all(self) -> Hyperparameters:
        """Everything, for a rank that knows nothing yet."""
        self._known = read_hyperparameters(self._groups)
        return self._known

    def changes(self) -> Hyperparameters | None:
        """What to tell the other rank; None when it knows all."""
        present = read_hyperparameters(self._groups)
        if present == self._known:
            return None
        self._known = present
        return present

    def take_over(self, values: Hyperparameters | None) -> None:
        """Write what the other rank has told."""
        if values is not None:
            write_hyperparameters(self._groups, values)
            self._known = read_hyperparameters(self._groups)
