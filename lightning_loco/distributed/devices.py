"""On which device a model lives, and what that means for the messages of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")

WITH_STREAMS = {"cuda"}
"""Kinds of devices that copy to and from pinned memory on a stream while the host goes on."""


def has_streams(device: torch.device) -> bool:
    """Whether a device copies to and from pinned memory while the host goes on."""
    return device.type in WITH_STREAMS


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter is; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def device_of_messages(
    outer_device: Literal["cpu"] | None, parameters: torch.device
) -> torch.device:
    """Where messages are made: in the host's memory if the user says so, or with the parameters."""
    return parameters if outer_device is None else CPU


def backend_on(device: torch.device, backend: str | None = None) -> str:
    """Name of what carries tensors of a device: ``"gloo"``, ``"nccl"``.

    Args:
        device: Where the tensors are.
        backend: As in ``torch.distributed.new_group``: a name, or one for each kind of device as
            in ``"cpu:gloo,cuda:nccl"``. Default: that of the default process group.

    Example:
        >>> backend_on(torch.device("cuda:3"), "cpu:gloo,cuda:nccl")
        'nccl'
    """
    config = backend or dist.get_backend_config()
    if ":" not in config:
        return config
    by_device = dict(pair.split(":") for pair in config.split(","))
    return by_device.get(device.type, "")


def check_same_kind(kinds: Sequence[str]) -> None:
    """Raise ValueError if some workers are on a CPU and others on a GPU, say.

    Their messages would wait for each other in vain.

    Args:
        kinds: ``torch.device.type`` of every worker, in order.
    """
    for worker, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"Worker {worker} is on a device of kind {kind!r} and worker 0 on {kinds[0]!r}. "
                "Start all workers on the same kind of device (Trainer(accelerator=...))."
            )
