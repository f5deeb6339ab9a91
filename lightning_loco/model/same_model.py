"""The same model on all workers: checks before training starts, and copies of worker 0's."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_loco.distributed.watchdog import capitalized
from lightning_loco.distributed.work import PendingWork
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.fingerprint import crc32
from lightning_loco.model.flat import FlatLayout, local_tensor
from lightning_loco.model.ownership import Block, find_holders

Gather = Callable[[Any, str], list[Any]]

_START = "the start from worker 0's parameters"
_COMPARISON = "the comparison of the models"
_PARTS = "shape", "dtype", "strides"


def check_model(model: nn.Module) -> None:
    """Raise ValueError if a model has no trainable parameters, or lazy or sparse ones."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"Parameter {name!r} is not initialised yet (lazy module). Run one forward pass, "
                "for example in LightningModule.configure_model, before training starts."
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"Module {name!r} makes sparse gradients, which are not supported. "
                "Build it with sparse=False."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "The model has no trainable parameters, so there is nothing to exchange. "
            "Set requires_grad=True on at least one parameter before fit."
        )


def check_same_schema(layout: FlatLayout, group: WorkerGroup) -> None:
    """Raise ValueError on all workers if their parameters differ; it names the first difference."""
    _compare(layout.schema(), "trainable parameters", group.gather_objects)


def check_same_tensors(model: nn.Module, gather: Gather) -> None:
    """Raise ValueError on all workers if parameters or buffers differ in name, shape or dtype.

    ``gather`` collects a value from every worker, as ``WorkerGroup.gather_objects`` does.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    schema = [(name, tuple(t.shape), str(t.dtype), "") for name, t in named]
    _compare(schema, "parameters and buffers", gather)


def check_same_blocks(model: nn.Module, gather: Gather) -> None:
    """Raise ValueError on all workers if they shard the parameters in different ways."""
    sharded = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if any(gather(bool(sharded), _COMPARISON)):
        schema = [(name, *Block.of(p)) for name, p in sharded]
        _compare(schema, "sharded parameters", gather, ("shape", "shards at", "shards of shape"))


def _compare(
    schema: Sequence[Sequence[object]],
    what: str,
    gather: Gather,
    parts: Sequence[str] = _PARTS,
) -> None:
    if len(set(gather(zlib.crc32(repr(schema).encode()), _COMPARISON))) == 1:
        return
    schemas = gather([[str(part) for part in entry] for entry in schema], _COMPARISON)
    for worker, other in enumerate(schemas):
        if other != schemas[0]:
            difference = first_difference(other, schemas[0], what, parts)
            raise ValueError(
                f"Worker {worker} holds a different model than worker 0: {difference}. Build the "
                "same model on every rank."
            )


def check_outer_device(group: WorkerGroup, outer_device: Literal["cpu"] | None) -> None:
    """Raise ValueError if a group cannot send messages from ``outer_device``."""
    if outer_device is not None and not group.wait_blocks_host:
        raise ValueError(
            "outer_device='cpu' sends messages from the host's memory, which this group's backend "
            "cannot. Make the group with WorkerGroup.create(backend='gloo')."
        )


def check_same_settings(settings: dict[str, Any], group: WorkerGroup) -> None:
    """Raise ValueError on all workers if settings differ; it names the first difference."""
    gathered = group.gather_from_ranks(settings, "the comparison of the settings")
    for name, other in zip(group.rank_names, gathered, strict=True):
        for key, value in gathered[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"{capitalized(name)} has {key}={other.get(key)!r} and {group.rank_names[0]} "
                    f"has {key}={value!r}. Start all workers with the same settings."
                )


def first_difference(
    there: Sequence[Sequence[object]],
    here: Sequence[Sequence[object]],
    what_all: str,
    parts: Sequence[str],
) -> str:
    """Describe the first difference between the schemas of another worker and of worker 0."""
    for (name, *spec), (name_0, *spec_0) in zip(there, here, strict=False):
        if name != name_0:
            return f"it has parameter {name!r} where worker 0 has {name_0!r}"
        for what, value, value_0 in zip(parts, spec, spec_0, strict=True):
            if value != value_0:
                return f"{name!r} has {what} {value} there and {value_0} on worker 0"
    longer = there if len(there) > len(here) else here
    extra = longer[min(len(there), len(here))][0]
    return (
        f"{len(there)} {what_all} there and {len(here)} on worker 0; the first extra one is "
        f"{extra!r} on {'that worker' if longer is there else 'worker 0'}"
    )


@torch.no_grad()
def broadcast_model(model: nn.Module, group: WorkerGroup) -> int:
    """Copy the parameters and buffers of worker 0 to all workers; return their CRC-32 checksum."""
    checksum = 0
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_inside(tensors, group, _START)
    group.announce_wait(_START)
    for tensor in map(local_tensor, tensors):
        if tensor.numel():
            if group.data is not None:
                _broadcast(tensor, group.ranks[0], group.data, group, _START)
            checksum = crc32(tensor.detach().contiguous().reshape(-1), checksum)
    return checksum


@torch.no_grad()
def broadcast_inside(tensors: Iterable[Tensor], group: WorkerGroup, label: str) -> None:
    """Copy tensors, or shards of them, to the ranks of a worker that hold the same elements.

    They get the values of the first of these ranks. All ranks of the worker must call it, with the
    same tensors; if any is a ``DTensor``, all ranks of all workers.
    """
    if group.inner is None:
        return
    tensors = list(tensors)
    holders = [tuple(range(group.replica_size)) for _ in tensors]
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        holders = find_holders([Block.of(tensor) for tensor in tensors], group)
        group.connect_inside([places for places in set(holders) if len(places) > 1], label)
    for tensor, places in zip(map(local_tensor, tensors), holders, strict=True):
        if len(places) > 1 and tensor.numel():
            members = group.inside[places]
            _broadcast(tensor, dist.get_global_rank(members, 0), members, group, label)


def _broadcast(
    tensor: Tensor, source: int, members: dist.ProcessGroup, group: WorkerGroup, label: str
) -> None:
    data = tensor.detach().contiguous().reshape(-1)
    work = dist.broadcast(data.view(torch.uint8), source, group=members, async_op=True)
    PendingWork(group, label, [work]).wait()
    if data.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(data.view(tensor.shape))
