"""What a local step is, with whatever optimizers and calls, and what those optimizers hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class LocalSteps:
    """Counts the steps of each optimizer; local steps are those of the one that has made most.

    Lightning tells of the steps that are made through it. Code may also call the ``step`` of a
    torch optimizer itself: while :meth:`watch` lasts, hooks of torch tell of those.
    """

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self._most = 0
        self._inside = 0

    def is_next(self, optimizer: Optimizer) -> bool:
        """Whether the coming step of an optimizer is one local step more."""
        return self._done.get(id(optimizer), 0) == self._most

    def is_new(self, optimizer: Optimizer) -> bool:
        """Count one step of an optimizer; whether it is one local step more."""
        is_next = self.is_next(optimizer)
        self._done[id(optimizer)] = self._done.get(id(optimizer), 0) + 1
        self._most += is_next
        return is_next

    @contextmanager
    def through_lightning(self) -> Iterator[None]:
        """A step that Lightning makes; those of optimizers in it are not told of."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def watch(
        self,
        parameters: Iterable[Tensor],
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
    ) -> Callable[[], None]:
        """Tell of steps that are not made through Lightning.

        An optimizer that steps another one within its own step, as wrappers do, counts once.

        Args:
            parameters: Optimizers without any of them are not told of.
            before: Called before such a step, with its optimizer.
            after: Called after it.

        Returns:
            What ends it.
        """
        watched = {id(parameter) for parameter in parameters}

        def concerns(optimizer: Optimizer) -> bool:
            groups = optimizer.param_groups
            return any(id(p) in watched for group in groups for p in group["params"])

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self._inside and concerns(optimizer):
                before(optimizer)
            self._inside += 1

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._inside -= 1
            if not self._inside and concerns(optimizer):
                after(optimizer)

        handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def begin_batch(self) -> None:
        """No step is under way; one that has failed may have left the impression."""
        self._inside = 0


def loss_in(output: Any) -> Tensor | float:
    """The loss that ``training_step`` has returned, detached; NaN if that is not one number."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss.detach() if loss.numel() == 1 else math.nan
    return float(loss) if isinstance(loss, (int, float)) else math.nan


def optimized_by(optimizers: Sequence[Optimizer]) -> list[Tensor] | None:
    """The parameters that optimizers step; None if they have none, so that nothing is known."""
    found = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return found or None


def check_left_out(left_out: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Raise RuntimeError if an optimizer has got a parameter that is not exchanged.

    Args:
        left_out: Names and parameters that no optimizer had at the start.
        optimizers: As they are now.
    """
    optimized = {id(p) for p in optimized_by(optimizers) or ()} if left_out else set()
    for name, parameter in left_out:
        if id(parameter) in optimized:
            raise RuntimeError(
                f"Parameter {name!r} was given to an optimizer during fit, but only parameters "
                "that one has at its start are exchanged. Return it from configure_optimizers, or "
                "call fit again with it."
            )


def clear_non_finite(optimizers: Sequence[Optimizer]) -> None:
    """Zero what NaN and infinity have left in the memory of the optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
