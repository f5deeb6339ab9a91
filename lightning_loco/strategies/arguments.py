"""Arguments that several strategies have: defined once, in the signature of each."""

from __future__ import annotations

import difflib
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
from lightning_loco.links import LinkLike

_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


class WorkerArguments(TypedDict, total=False):
    """Arguments of every strategy; see LocoStrategy for meanings and defaults."""

    timeout_s: float
    summary: bool
    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    process_group_backend: str | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


class CommonArguments(WorkerArguments, total=False):
    """Arguments of every strategy with an engine."""

    evaluate: Literal["average", "outer", "local"]
    finalize: Literal["average", "keep"]
    checkpoint_folder: Literal["shared", "private"]
    replica_size: int | Literal["node"]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool


class RoundArguments(CommonArguments, total=False):
    """Arguments of every strategy whose rounds start by local steps."""

    bucket_bytes: int
    compression: Codec | ErrorFeedback | Compensated | str | None
    membership: Membership | None
    link: LinkLike | None
    outer_device: Literal["cpu"] | None


def spelled_out(source: Callable[..., None]) -> Callable[[_Constructor], _Constructor]:
    """Replace a constructor's ``**common: Unpack[Table]`` by the arguments of the table.

    ``source`` has these arguments, and gives their defaults and types. ``help()``,
    ``inspect.signature`` and LightningCLI then show all arguments, and others raise.
    """

    def decorate(init: _Constructor) -> _Constructor:
        *own, common = parameters_of(init)
        (table,) = get_args(common.annotation)
        return with_signature([*own, *common_parameters(table, source)])(init)

    return decorate


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with annotations that are types and not strings."""
    hints = get_type_hints(function)
    return [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in inspect.signature(function).parameters.values()
    ]


def common_parameters(
    table: type[WorkerArguments], source: Callable[..., None]
) -> list[inspect.Parameter]:
    """Return those parameters of a function that are in a table of common arguments."""
    return [
        parameter for parameter in parameters_of(source) if parameter.name in get_type_hints(table)
    ]


def with_signature(
    parameters: Sequence[inspect.Parameter],
) -> Callable[[_Constructor], _Constructor]:
    """Set the signature of a constructor, which is then called with keyword arguments only."""
    signature = inspect.Signature(parameters, return_annotation=None)

    def decorate(init: _Constructor) -> _Constructor:
        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                name = str(error).rpartition("unexpected keyword argument ")[2].strip("'")
                close = difflib.get_close_matches(name, list(signature.parameters), 1)
                instead = f". Did you mean {close[0]}?" if close else ""
                raise TypeError(f"{init.__qualname__}() {error}{instead}") from None
            init(**given)

        vars(checked)["__signature__"] = signature
        checked.__annotations__ = {p.name: p.annotation for p in parameters if p.name != "self"}
        return cast(_Constructor, checked)

    return decorate
