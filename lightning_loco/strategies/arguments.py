"""Arguments that several strategies have: declared once, shown everywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from typing_extensions import get_type_hints

from lightning_loco.compression import Codec, Compensated, ErrorFeedback
from lightning_loco.engine.membership import Membership
from lightning_loco.links.links import LinkLike

_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


class CommonArguments(TypedDict, total=False):
    """What every strategy of workers takes; meanings and defaults are those of LocoStrategy."""

    evaluate: Literal["average", "outer", "local"]
    finalize: Literal["average", "keep"]
    checkpoint_folder: Literal["shared", "private"]
    timeout_s: float
    summary: bool
    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    process_group_backend: str | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


class RoundArguments(CommonArguments, total=False):
    """And what those take that make rounds after so many steps."""

    bucket_bytes: int
    compression: Codec | ErrorFeedback | Compensated | str | None
    membership: Membership | None
    link: LinkLike | None
    outer_device: Literal["cpu"] | None


def spelled_out(source: Callable[..., None]) -> Callable[[_Constructor], _Constructor]:
    """Write a constructor's ``**common: Unpack[Table]`` out, one argument after the other.

    ``help()``, ``inspect.signature`` and LightningCLI then show all arguments, and others raise.

    Args:
        source: A function that has these arguments; their defaults and types are taken from it.
    """

    def decorate(init: _Constructor) -> _Constructor:
        *own, common = parameters_of(init)
        (table,) = get_args(common.annotation)
        return with_signature([*own, *common_parameters(table, source)])(init)

    return decorate


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, with types instead of their names."""
    hints = get_type_hints(function)
    return [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in inspect.signature(function).parameters.values()
    ]


def common_parameters(
    table: type[CommonArguments], source: Callable[..., None]
) -> list[inspect.Parameter]:
    """The parameters of a function that a table of common arguments names."""
    return [
        parameter for parameter in parameters_of(source) if parameter.name in get_type_hints(table)
    ]


def with_signature(
    parameters: Sequence[inspect.Parameter],
) -> Callable[[_Constructor], _Constructor]:
    """Give a constructor these arguments; it is called with those given, by name."""
    signature = inspect.Signature(parameters, return_annotation=None)

    def decorate(init: _Constructor) -> _Constructor:
        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}() {error}") from None
            init(**given)

        vars(checked)["__signature__"] = signature
        checked.__annotations__ = {p.name: p.annotation for p in parameters if p.name != "self"}
        return cast(_Constructor, checked)

    return decorate
