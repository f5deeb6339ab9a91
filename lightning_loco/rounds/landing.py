"""How a result that comes late, and the local steps made meanwhile, become local parameters."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.rounds.parcels import Part


@dataclasses.dataclass(frozen=True)
class Landing(ABC):
    """What a flight does to the local parameters of one part when it lands.

    A round that ends where it began needs none: its result is the new local parameters.
    """

    lands_first: ClassVar[bool]
    """Whether a flight lands before the next message is made, instead of after."""

    keeps_departure: ClassVar[bool]
    """Whether the parameters that left are to be kept: one more vector ``(P,)``."""

    @abstractmethod
    def begin(self, part: Part, valid: bool) -> None:
        """Write the parameters with which local steps go on while a first flight is under way.

        ``valid`` says whether the local parameters are finite.
        """

    @abstractmethod
    def land(self, part: Part, result: Tensor, valid: bool) -> None:
        """Write the new local parameters of a part.

        Args:
            part: Where; ``part.departure`` has the local parameters that left, if they are kept.
            result: What the algorithm made of the round, ``(len(part),)``.
            valid: Whether the local parameters were finite when they left, and are now.
        """


@dataclasses.dataclass(frozen=True)
class Restart(Landing):
    r"""Local steps begin again at the result: :math:`\theta \leftarrow r`.

    What was learned meanwhile is in the next message, which is made before.
    """

    lands_first = False
    keeps_departure = False

    def begin(self, part: Part, valid: bool) -> None:
        """Back to the start of the round."""
        if (start := part.start()) is not None:
            part.unpack(start)

    def land(self, part: Part, result: Tensor, valid: bool) -> None:
        """The result."""
        part.unpack(result)


@dataclasses.dataclass(frozen=True)
class KeepProgress(Landing):
    r"""The result moves under the local steps made meanwhile.

    .. math:: \theta \leftarrow r + (\theta - s)

    with the local parameters :math:`s` that left. After a landing ``part.departure`` holds what was
    written, exactly, also when the parameters themselves are in a narrower dtype.
    """

    lands_first = True
    keeps_departure = True

    def begin(self, part: Part, valid: bool) -> None:
        """Local steps go on; if they are not finite, from the start of the round, if known."""
        if not valid:
            Restart().begin(part, valid)

    def land(self, part: Part, result: Tensor, valid: bool) -> None:
        """The result plus the progress; none if it is not valid."""
        assert part.departure is not None
        if valid:
            part.read_local(part.scratch)
            torch.sub(part.scratch, part.departure, out=part.departure).add_(result)
        else:
            part.departure.copy_(result)
        part.unpack(part.departure)


def landing_of(algorithm: Algorithm) -> Landing:
    """The landing that an algorithm names; restarting if it can have no late results."""
    return KeepProgress() if algorithm.late_landing == "keep_progress" else Restart()
