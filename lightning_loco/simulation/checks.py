"""Checks of all simulations: the models are equal, and the length of a run is valid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lightning_loco.model.same_model import check_model, first_difference


def copy_first(models: Sequence[nn.Module]) -> None:
    """Give all models the parameters and buffers of the first one.

    ValueError if a model cannot be trained, or if names, shapes, dtypes, strides or
    ``requires_grad`` differ.
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
    """Describe all parameters and buffers, with the strides of trainable ones."""

    def describe(name: str, tensor: Tensor) -> tuple[object, ...]:
        strides = tensor.stride() if tensor.requires_grad else ()
        return name, tensor.requires_grad, tuple(tensor.shape), str(tensor.dtype), strides

    return [describe(*named) for named in (*model.named_parameters(), *model.named_buffers())]


def check_length(num_rounds: int | None, seconds: float | None, step_s: Sequence[float]) -> None:
    """Raise TypeError or ValueError unless the length is a number of rounds or a time.

    ``step_s`` holds the mean duration of a local step of each worker, in seconds.
    """
    if (num_rounds is None) == (seconds is None):
        raise ValueError("Give num_rounds or seconds, and not both.")
    if num_rounds is not None and (isinstance(num_rounds, bool) or not isinstance(num_rounds, int)):
        raise TypeError(f"num_rounds must be an integer, got {num_rounds!r}.")
    if seconds is None:
        return
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 0 and finite, got {seconds!r}.")
    if min(step_s) == 0:
        raise ValueError("Local steps take no time without speeds. Give num_rounds instead.")
