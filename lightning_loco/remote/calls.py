"""What is said about a step, besides the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lightning_loco.remote.hyperparameters import Hyperparameters


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
