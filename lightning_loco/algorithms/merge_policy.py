"""Merge policies: how a late result and the local steps taken meanwhile are combined."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class MergePolicy:
    """Combines the result of an overlapped round with the local steps taken while it was pending.

    A blocking round needs no policy: its result is the new local parameters.
    """

    keeps_progress: ClassVar[bool]
    """Whether the result is added to the local steps taken meanwhile. If so, a pending round is
    applied before the next message is computed. If not, it is applied after that, because the
    message contains those local steps; and when the first overlapped round begins, local steps
    restart from the start of the round."""

    keeps_sent: ClassVar[bool]
    """Whether a copy of the parameters at the time of sending is needed, one vector ``(P,)``."""

    @property
    def kept_share(self) -> float:
        """Share of these local steps that stays, if the message does not contain them."""
        return float(self.keeps_progress)

    def keeps_sent_params(self, is_rounded: bool) -> bool:
        """Return whether the parameters at the time of sending are kept.

        If ``is_rounded``, that is for narrow dtypes such as bfloat16, a policy that keeps progress
        always keeps them, because the rounding error of the parameters is computed from them.
        """
        return self.keeps_sent or (self.keeps_progress and is_rounded)

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
        """Compute the new local parameters; only called if :attr:`keeps_progress`.

        Args:
            result: The result of the algorithm, ``(P,)`` or a slice; only read.
            local: The current local parameters; may be overwritten.
            sent_params: The local parameters at the time of sending, or None if they are not kept;
                may be overwritten.

        Returns:
            One of the arguments.
        """
        return result


@dataclasses.dataclass(frozen=True)
class Restart(MergePolicy):
    r"""Local steps restart from the result: :math:`\theta \leftarrow r`.

    The local steps taken meanwhile are in the next message, which is computed before.
    """

    keeps_progress = False
    keeps_sent = False


@dataclasses.dataclass(frozen=True)
class KeepProgress(MergePolicy):
    r"""The local steps taken meanwhile are added to the result.

    .. math:: \theta \leftarrow r + (\theta - s)

    with the local parameters :math:`s` at the time of sending.

    Example:
        >>> result, local, sent_params = torch.tensor([[7.0], [3.0], [2.0]])
        >>> KeepProgress().merge(result, local, sent_params)
        tensor([8.])
    """

    keeps_progress = True
    keeps_sent = True

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
        """Return the result plus the progress since sending."""
        assert sent_params is not None
        return torch.sub(local, sent_params, out=sent_params).add_(result)


@dataclasses.dataclass(frozen=True)
class Mix(MergePolicy):
    r"""The result is mixed with the current local parameters.

    .. math:: \theta \leftarrow \beta\,\theta + (1 - \beta)\,r

    Args:
        mix: Share :math:`\beta` of the local parameters, in [0, 1]. With 0 the result replaces the
            local parameters, and the local steps taken meanwhile are lost. With 1 only the outer
            parameters change, and each worker trains on its own.

    Raises:
        TypeError: If it is not a number.
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

    @property
    def kept_share(self) -> float:
        """The share of the local parameters."""
        return self.mix

    def merge(self, result: Tensor, local: Tensor, sent_params: Tensor | None) -> Tensor:
        """Return the weighted mean of the result and the local parameters."""
        return result if self.mix == 0 else local.lerp_(result, 1 - self.mix)
