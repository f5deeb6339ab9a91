"""Whether all that was agreed on at the start can still be exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def check_exchanged(groups: Sequence[dict[str, Any]], frozen: Iterable[Tensor]) -> None:
    """Refuse gradients that cannot be sent, and parameters that nobody expects.

    Args:
        groups: Parameter groups, before a step.
        frozen: Their parameters that did not require gradients at the start.

    Raises:
        ValueError: If a gradient is sparse.
        RuntimeError: If a parameter requires gradients only since the start.
    """
    for group in groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(
                    "A parameter has a sparse gradient, which cannot be sent. Use "
                    "Embedding(sparse=False)."
                )
    if any(param.requires_grad for param in frozen):
        raise RuntimeError(
            "A parameter became trainable after the start, but only parameters that require "
            "gradients then are exchanged. Unfreeze before fit, or call fit again after "
            "unfreezing."
        )
