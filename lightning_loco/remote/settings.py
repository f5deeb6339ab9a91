"""The numbers of an optimizer that schedules change: learning rates, momenta, weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Settings = list[dict[str, Any]]
"""One entry per parameter group: name and number, truth value or list of these."""


def read_settings(groups: Sequence[dict[str, Any]]) -> Settings:
    """The numbers of parameter groups, as JSON can hold them."""
    return [
        {name: plain for name, value in group.items() if (plain := _plain(value)) is not None}
        for group in groups
    ]


def write_settings(groups: Sequence[dict[str, Any]], settings: Settings) -> None:
    """Put numbers into parameter groups, in place."""
    for group, values in zip(groups, settings, strict=True):
        for name, value in values.items():
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


class SettingsMirror:
    """Settings that two ranks keep equal: whoever changes them tells the other.

    Args:
        groups: The parameter groups on this rank.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups
        self._known: Settings | None = None

    def all(self) -> Settings:
        """Everything, for a rank that knows nothing yet."""
        self._known = read_settings(self._groups)
        return self._known

    def changes(self) -> Settings | None:
        """What to tell the other rank; None when it knows all."""
        present = read_settings(self._groups)
        if present == self._known:
            return None
        self._known = present
        return present

    def take_over(self, settings: Settings | None) -> None:
        """Write what the other rank has told."""
        if settings is not None:
            write_settings(self._groups, settings)
            self._known = read_settings(self._groups)


def is_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a parameter depends on its own gradient and state alone.

    True for what is in ``torch.optim``, except LBFGS; unknown, so False, for all others.
    """
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not isinstance(optimizer, torch.optim.LBFGS)
