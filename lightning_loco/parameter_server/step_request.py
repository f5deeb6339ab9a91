"""What is said about a step besides the gradients: wishes, and numbers that schedules set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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


class Clip(NamedTuple):
    """How to clip the mean gradient before the step.

    Attributes:
        by: ``"norm"``, of all gradients together, or ``"value"``, of each element.
        limit: Positive.
    """

    by: Literal["norm", "value"]
    limit: float


class Call(NamedTuple):
    """A worker's wishes for one step.

    Attributes:
        missing: Numbers of the parameters without a gradient.
        hyperparameters: Learning rates and the like, if this worker has changed them.
        clip: How to clip.
        stop: Why all should stop after this step, if this worker was asked to.
        changed: Checksum of this worker's parameters, if they were changed by hand.
    """

    missing: tuple[int, ...] = ()
    hyperparameters: Hyperparameters | None = None
    clip: Clip | None = None
    stop: str | None = None
    changed: str | None = None

    def content(self) -> dict[str, Any]:
        """The wishes that are not empty, by name, for a note."""
        return {name: value for name, value in self._asdict().items() if value}

    @classmethod
    def read(cls, content: dict[str, Any]) -> Call:
        """Read the content of a note that :meth:`content` has made."""
        call = cls(**content)
        clip = None if call.clip is None else Clip(*call.clip)
        return call._replace(missing=tuple(call.missing), clip=clip)

    @classmethod
    def merge(cls, calls: Sequence[Call]) -> Call:
        """What all workers together want: the first one's word where they differ.

        A parameter is left out of the step where no worker has a gradient for it.
        """
        missing = set(calls[0].missing).intersection(*(call.missing for call in calls))

        def first(name: str) -> Any:
            return next((value for call in calls if (value := getattr(call, name))), None)

        return cls(tuple(sorted(missing)), first("hyperparameters"), first("clip"), first("stop"))
