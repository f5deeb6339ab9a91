"""The device of a model, and of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_loco.distributed.watchdog import capitalized

CPU = torch.device("cpu")

WITH_STREAMS = {"cuda"}
"""Types of devices that copy to and from pinned memory asynchronously."""


def has_streams(device: torch.device) -> bool:
    """Return whether a device copies to and from pinned memory while the host continues."""
    return device.type in WITH_STREAMS


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def device_of_messages(
    outer_device: Literal["cpu"] | None, parameters: torch.device
) -> torch.device:
    """Return the device of messages: ``outer_device`` if given, else the parameters' device."""
    return parameters if outer_device is None else CPU


def backend_on(device: torch.device, backend: str | None = None) -> str:
    """Return the name of the backend for tensors of a device: ``"gloo"``, ``"nccl"``.

    Args:
        device: Device of the tensors.
        backend: As in ``torch.distributed.new_group``: one name, or one for each type of device,
            ``"cpu:gloo,cuda:nccl"``. Default: the backend of the default process group.

    Example:
        >>> backend_on(torch.device("cuda:3"), "cpu:gloo,cuda:nccl")
        'nccl'
    """
    config = backend or dist.get_backend_config()
    if ":" not in config:
        return config
    by_device = dict(pair.split(":") for pair in config.split(","))
    return by_device.get(device.type, "")


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors that the collectives of a group take."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def check_same_kind(names: Sequence[str], kinds: Sequence[str]) -> None:
    """Raise ValueError if the types of devices of ranks with these names differ.

    Their collectives would use different backends and never complete.
    """
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"{capitalized(name)} is on a device of kind {kind!r} and {names[0]} on "
                f"{kinds[0]!r}. "
                "Start all workers on the same kind of device (Trainer(accelerator=...))."
            )
