"""Checks that all simulations make: equal models, and for how long they run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lightning_loco.parameters.schema import check_model, first_difference


def copy_first(models: Sequence[nn.Module]) -> None:
    """Give all models the parameters and buffers of the first one.

    ValueError if one cannot be trained, or if they differ in name, shape, dtype or strides, or in
    what is trainable.
    """
    for model in models:
        check_model(model)
    first = _schema(models[0])
    for worker, model in enumerate(models):
        if (schema := _schema(model)) != first:
            parts = "requires_grad", "shape", "dtype", "strides"
            difference = first_difference(schema, first, "parameters and buffers", parts)
            raise ValueError(
                f"Worker {worker} holds a different model than worker 0: {difference}. Build the "
                "same model for every worker."
            )
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())


def _schema(model: nn.Module) -> list[tuple[object, ...]]:
    """Describe all parameters and buffers; strides matter for what is trained."""

    def describe(name: str, tensor: Tensor) -> tuple[object, ...]:
        strides = tensor.stride() if tensor.requires_grad else ()
        return name, tensor.requires_grad, tuple(tensor.shape), str(tensor.dtype), strides

    return [describe(*named) for named in (*model.named_parameters(), *model.named_buffers())]


def check_length(
    what: str, number: int | None, seconds: float | None, step_s: Sequence[float]
) -> None:
    """Raise TypeError or ValueError unless a run is for a number of steps or rounds, or for a time.

    Args:
        what: ``"steps"`` or ``"rounds"``.
        number: How many.
        seconds: How much time passes instead.
        step_s: Mean seconds of a local step, of each worker.
    """
    if (number is None) == (seconds is None):
        raise ValueError(f"Give num_{what} or seconds, and not both.")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
        raise TypeError(f"num_{what} must be an integer, got {number!r}.")
    if seconds is None:
        return
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 0 and finite, got {seconds!r}.")
    if min(step_s) == 0:
        raise ValueError(f"Local steps take no time without speeds. Give num_{what} instead.")
