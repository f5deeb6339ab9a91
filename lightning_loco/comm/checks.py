"""What must be true of a model before its training starts, on every worker."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
import zlib
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_loco.comm.flat import FlatLayout, Schema
from lightning_loco.comm.groups import WorkerGroup


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be exchanged.

    Raises:
        ValueError: Without trainable parameters, with uninitialised (lazy) ones, or with sparse
            gradients.
    """
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
    """Compare the model's parameters between all workers.

    Raises:
        ValueError: On every worker, naming the first difference.
    """
    schema = layout.schema()
    digests = group.gather_objects(zlib.crc32(repr(schema).encode()))
    if len(set(digests)) == 1:
        return
    schemas: list[Schema] = group.gather_objects(schema)
    for worker, other in enumerate(schemas):
        if other != schemas[0]:
            raise ValueError(
                f"Worker {worker} holds a different model than worker 0: "
                f"{first_difference(other, schemas[0])}. Build the same model on every rank."
            )


def check_same_settings(settings: dict[str, Any], group: WorkerGroup) -> None:
    """Compare what the user has set between all workers.

    Raises:
        ValueError: On every worker, naming the first difference.
    """
    for worker, other in enumerate(everyone := group.gather_objects(settings)):
        for key, value in everyone[0].items():
            if other.get(key) != value:
                raise ValueError(
                    f"Worker {worker} has {key}={other.get(key)!r} and worker 0 has "
                    f"{key}={value!r}. Start all workers with the same settings."
                )


def plain(value: Any) -> Any:
    """A value that a user has set, as numbers, strings and lists that tell other values apart.

    Functions are told by their name and code, objects without a text of their own by their pickle.

    Example:
        >>> plain(functools.partial(max, key=3))
        ['partial', 'builtins.max', [], {'key': 3}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return ["partial", plain(value.func), plain(value.args), plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        code = getattr(value, "__code__", None)
        closure = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        name = f"{value.__module__}.{value.__qualname__}"
        if code is None or "<" not in name:
            return name
        return [name, *_plain_code(code), plain(value.__defaults__), plain(closure)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, plain(held)]
    has_own_text = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    if has_own_text:
        return repr(value)
    return f"{type(value).__qualname__} {hashlib.blake2b(pickle.dumps(value)).hexdigest()[:16]}"


def _plain_code(code: CodeType) -> list[Any]:
    """What a function does: without the addresses and files that its own text would show."""
    inner = [_plain_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), inner]


def first_difference(there: Schema, here: Schema) -> str:
    """Say in words where the schema of another worker differs from that of worker 0."""
    for (name, *spec), (name_0, *spec_0) in zip(there, here, strict=False):
        if name != name_0:
            return f"parameter {name!r} there stands where worker 0 has {name_0!r}"
        for what, value, value_0 in zip(("shape", "dtype", "strides"), spec, spec_0, strict=True):
            if value != value_0:
                return f"{name!r} has {what} {value} there and {value_0} on worker 0"
    longer = there if len(there) > len(here) else here
    extra = longer[min(len(there), len(here))][0]
    return (
        f"{len(there)} trainable parameters there and {len(here)} on worker 0; the first one more "
        f"is {extra!r} on {'that worker' if longer is there else 'worker 0'}"
    )


def schema_checksum(schema: object) -> int:
    """64 bits that tell different models apart.

    Args:
        schema: Lists, tuples, strings and numbers, such as
            :meth:`~lightning_loco.comm.flat.FlatLayout.schema`.

    Example:
        >>> schema_checksum([("weight", (2, 3))]) == schema_checksum([("weight", (3, 2))])
        False
    """
    digest = hashlib.blake2b(repr(schema).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.no_grad()
def share_from_worker_0(model: nn.Module, group: WorkerGroup) -> int:
    """Give every worker the parameters and buffers of worker 0.

    Returns:
        A CRC-32 checksum of all of them, equal on all workers.
    """
    checksum = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        data = tensor.detach().contiguous().reshape(-1)
        raw = data.view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8)
        if group.data is not None and raw.numel():
            dist.broadcast(raw, src=0, group=group.data)
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data.view(tensor.shape))
        checksum = zlib.crc32(_bytes(raw), checksum)
    return checksum


def _bytes(raw: Tensor) -> bytes:
    return raw.cpu().numpy().tobytes()
