"""How a result that comes late, and the local steps made meanwhile, become local parameters."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Landing:
    """What becomes of the local steps that were made while a round was under way.

    A round that ends where it began needs none: its result is the new local parameters.
    """

    keeps_progress: ClassVar[bool]
    """Whether those local steps count. A flight then lands before the next message is made;
    otherwise after, since the message tells of them, and a first flight leaves local steps to begin
    again at the start of the round."""

    keeps_departure: ClassVar[bool]
    """Whether the parameters that left are to be kept: one more vector ``(P,)``."""

    def land(self, result: Tensor, local: Tensor, departure: Tensor | None) -> Tensor:
        """Compute the new local parameters; only called if there is progress to keep.

        Args:
            result: What the algorithm made of the round, ``(P,)`` or a slice; only read.
            local: The local parameters now; may serve as scratch.
            departure: Those that left, or None if they are not kept; may serve as scratch.

        Returns:
            One of the arguments.
        """
        return result


@dataclasses.dataclass(frozen=True)
class Restart(Landing):
    r"""Local steps begin again at the result: :math:`\theta \leftarrow r`.

    What was learned meanwhile is in the next message, which is made before.
    """

    keeps_progress = False
    keeps_departure = False


@dataclasses.dataclass(frozen=True)
class KeepProgress(Landing):
    r"""The result moves under the local steps made meanwhile.

    .. math:: \theta \leftarrow r + (\theta - s)

    with the local parameters :math:`s` that left.

    Example:
        >>> result, local, departure = torch.tensor([[7.0], [3.0], [2.0]])
        >>> KeepProgress().land(result, local, departure)
        tensor([8.])
    """

    keeps_progress = True
    keeps_departure = True

    def land(self, result: Tensor, local: Tensor, departure: Tensor | None) -> Tensor:
        """The result plus the progress."""
        assert departure is not None
        return torch.sub(local, departure, out=departure).add_(result)
