"""How a result that comes late, and the local steps made meanwhile, become local parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class MergePolicy:
    """What becomes of the local steps that were made while a round was under way.

    A round that ends where it began needs none: its result is the new local parameters.
    """

    keeps_progress: ClassVar[bool]
    """Whether those local steps count. A pending round then lands before the next message is made;
    otherwise after, since the message tells of them, and a first pending round leaves local steps
    to begin again at the start of the round."""

    keeps_sent: ClassVar[bool]
    """Whether the parameters that left are to be kept: one more vector ``(P,)``."""

    def keeps_sent_params(self, is_rounded: bool) -> bool:
        """Whether they are kept; always if progress counts and parameters are narrow (bfloat16).

        What is lost by rounding the parameters when they are written is known from there.
        """
        return self.keeps_sent or (self.keeps_progress and is_rounded)

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
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
class Restart(MergePolicy):
    r"""Local steps begin again at the result: :math:`\theta \leftarrow r`.

    What was learned meanwhile is in the next message, which is made before.
    """

    keeps_progress = False
    keeps_sent = False


@dataclasses.dataclass(frozen=True)
class KeepProgress(MergePolicy):
    r"""The result moves under the local steps made meanwhile.

    .. math:: \theta \leftarrow r + (\theta - s)

    with the local parameters :math:`s` that left.

    Example:
        >>> result, local, sent_params = torch.tensor([[7.0], [3.0], [2.0]])
        >>> KeepProgress().merge(result, local, sent_params)
        tensor([8.])
    """

    keeps_progress = True
    keeps_sent = True

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
        """The result plus the progress."""
        assert sent_params is not None
        return torch.sub(local, sent_params, out=sent_params).add_(result)


@dataclasses.dataclass(frozen=True)
class Mix(MergePolicy):
    r"""The result is mixed with the local parameters as they are when it lands.

    .. math:: \theta \leftarrow \beta\,\theta + (1 - \beta)\,r

    Args:
        mix: The local share :math:`\beta` in [0, 1]. With 0 the result replaces the local
            parameters, and the local steps made meanwhile are lost; with 1 results move the outer
            parameters alone, and each worker trains for itself.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example:
        >>> Mix(0.25).merge(torch.tensor([8.0]), torch.tensor([4.0]), None)
        tensor([7.])
    """

    mix: float = 0.5

    keeps_progress = True
    keeps_sent = False

    def __post_init__(self) -> None:
        """Check the range."""
        if isinstance(self.mix, bool) or not isinstance(self.mix, (int, float)):
            raise TypeError(f"mix must be a number in [0, 1], got {self.mix!r}.")
        if not (math.isfinite(self.mix) and 0 <= self.mix <= 1):
            raise ValueError(
                f"mix is the share of the local parameters and must be in [0, 1], got {self.mix}. "
                "Common values are 0.5, and 0 to take the result as it is."
            )

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
        """Between the two."""
        return result if self.mix == 0 else local.lerp_(result, 1 - self.mix)
