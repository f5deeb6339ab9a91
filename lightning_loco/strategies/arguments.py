"""Keyword arguments that several strategies have in common: one table of them for each kind.

Annotations are types here and not strings, because LightningCLI reads them at run time.
"""

import inspect
from typing import Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from typing_extensions import NotRequired, TypedDict, get_type_hints

from lightning_loco.engine.settings import RoundOptions


class WorkerArguments(TypedDict):
    """Keyword arguments of every strategy; :class:`RoundArguments` says what they mean."""

    timeout_s: NotRequired[float]
    summary: NotRequired[bool]
    accelerator: NotRequired[Accelerator | None]
    parallel_devices: NotRequired[list[torch.device] | None]
    cluster_environment: NotRequired[ClusterEnvironment | None]
    checkpoint_io: NotRequired[CheckpointIO | None]
    precision_plugin: NotRequired[Precision | None]
    process_group_backend: NotRequired[str | None]
    start_method: NotRequired[Literal["popen", "spawn", "fork", "forkserver"]]


class CommonArguments(WorkerArguments):
    """Keyword arguments of every strategy whose workers have copies of the model.

    :class:`RoundArguments` says what they mean.
    """

    evaluate: NotRequired[Literal["average", "outer", "local"]]
    finalize: NotRequired[Literal["average", "keep"]]
    checkpoint_folder: NotRequired[Literal["shared", "private"]]
    replica_size: NotRequired[int | Literal["node"]]
    find_unused_parameters: NotRequired[bool]
    static_graph: NotRequired[bool]
    gradient_as_bucket_view: NotRequired[bool]


class RoundArguments(CommonArguments, RoundOptions):
    """Keyword arguments of every strategy whose rounds start after a number of local steps.

    Args:
        compression: How messages are written on the wire: ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"int4"``, ``"e3m0"``, ``"sparse"``, or a codec such as ``Int8(block=128)`` or
            ``ErrorFeedback(Sparse(k=32))`` or ``Compensated(Sparse())``. Default: uncompressed.
        bucket_bytes: Memory for pending messages, in bytes. Default: 64 MiB.
        membership: Source of the members, if workers join and leave: ``Elastic("host:port")``.
            Every job is then one worker, of ``replica_size`` ranks. Default: all ranks, during the
            whole run.
        link: A slower link to emulate: ``"wan"``, ``"dsl"``, ``"lan"``, ``"datacentre"``, a
            ``Link``, a list with one for each worker, or the path of a file that names workers or
            pairs. Default: no emulation.
        outer_device: ``"cpu"`` to keep the state of the algorithm (outer parameters, momentum) and
            all messages in the host's memory, which leaves the GPU's to training; messages are then
            sent by gloo. Default: the device of the parameters.
        evaluate: ``"average"`` (default) validates and saves the mean of the workers' local
            parameters; ``"outer"`` the outer parameters of DiLoCo after the last round, which costs
            no communication but changes with rounds only; ``"local"`` validates each worker's own
            parameters and saves the mean.
        finalize: ``"average"`` (default) leaves the mean in the model after fit, ``"keep"`` each
            worker's own parameters (until ``Trainer.validate``, which broadcasts worker 0's).
        checkpoint_folder: ``"private"`` if each worker writes checkpoints to its own disk,
            ``"shared"`` (default) if all see the same folder.
        replica_size: Number of consecutive ranks that are one worker, or ``"node"`` for the ranks
            of a node. They average their gradients in every step, as with DDP, and divide the
            worker's share of the data evenly. Default: 1.
        find_unused_parameters: As in torch's ``DistributedDataParallel``, for workers of several
            ranks; a worker of one rank needs no DDP. Default: False, like the next two.
        static_graph: As in ``DistributedDataParallel``, for workers of several ranks.
        gradient_as_bucket_view: As in ``DistributedDataParallel``, for workers of several ranks.
        timeout_s: Longest wait for another worker, in seconds. Default: 600.
        summary: Whether fit ends with a short table of steps, rounds, bytes and seconds. Default:
            True.
        accelerator: As in ``DDPStrategy``; usually set by the Trainer.
        parallel_devices: As in ``DDPStrategy``.
        cluster_environment: As in ``DDPStrategy``.
        checkpoint_io: As in ``DDPStrategy``.
        precision_plugin: As in ``DDPStrategy``.
        process_group_backend: As in ``DDPStrategy``: ``"nccl"``, ``"gloo"``; None (default)
            chooses.
        start_method: How Lightning starts processes: ``"popen"`` (default), ``"spawn"``,
            ``"fork"`` or ``"forkserver"``.
    """


def argument_names(strategy: type[Strategy]) -> set[str]:
    """Return the names of a strategy's own arguments, and of those in its table of common ones."""
    names = set()
    hints = get_type_hints(strategy.__init__)
    for name, parameter in inspect.signature(strategy).parameters.items():
        tables = get_args(hints.get(name)) if parameter.kind is parameter.VAR_KEYWORD else ()
        names |= {key for table in tables for key in table.__annotations__} or {name}
    return names
