"""The state of a run on its way to a newcomer: raw tensors, and what they are in JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.distributed import notes
from lightning_loco.elastic.group import Groups
from lightning_loco.fault_points import reach

LONGEST_BYTES = 64 * 2**20
"""The longest description."""

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)} | {
    str(d): d for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


class StateTransfer(NamedTuple):
    """What a newcomer needs.

    Attributes:
        tensors: By name, in the host's memory.
        values: Plain values: where the run is.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def all_of_them(tensor: Tensor) -> bool:
    """Every tensor travels."""
    return True


def send(
    handover: StateTransfer,
    groups: Groups,
    to: int,
    travels: Callable[[Tensor], bool] = all_of_them,
) -> None:
    """Send it to one member.

    Args:
        handover: What to send.
        groups: With the open group.
        to: Place of that member.
        travels: Which tensors to send; of the others the member learns dtype and shape.

    Raises:
        RuntimeError: If the connection breaks.
    """
    kept = {name: tensor.contiguous() for name, tensor in handover.tensors.items()}
    kinds = {name: [str(t.dtype), list(t.shape)] for name, t in kept.items()}
    text = notes.write({"tensors": kinds, "values": handover.values})
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = [tensor.reshape(-1) for tensor in kept.values() if travels(tensor)]
    groups.send([torch.tensor([len(text)])], to)
    groups.send([head], to)
    reach("sending the state")
    groups.send(sent, to)


def receive(
    groups: Groups,
    source: int,
    longest_bytes: int,
    travels: Callable[[Tensor], bool] = all_of_them,
) -> StateTransfer:
    """Receive it from a member.

    Args:
        groups: With the open group.
        source: Place of that member.
        longest_bytes: The most that all tensors may take.
        travels: Which tensors that member sends; the others are zero.

    Raises:
        RuntimeError: If the connection breaks, or brings something else.
    """
    length = torch.zeros(1, dtype=torch.int64)
    groups.receive([length], source)
    if not 0 < int(length) <= LONGEST_BYTES:
        raise RuntimeError(f"The state of the run begins with {int(length)} bytes of description.")
    head = torch.empty(int(length), dtype=torch.uint8)
    groups.receive([head], source)
    described = notes.read(head.numpy().tobytes(), "The member that brings the state")
    tensors = {
        name: torch.zeros(shape, dtype=_DTYPES[dtype])
        for name, (dtype, shape) in _checked(described, longest_bytes).items()
    }
    sent = [tensor.view(-1) for tensor in tensors.values() if travels(tensor)]
    reach("receiving the state")
    groups.receive(sent, source)
    return StateTransfer(tensors, described["values"])


def _checked(described: Any, longest_bytes: int) -> dict[str, tuple[str, list[int]]]:
    """Names, dtypes and shapes, if they are such and not too large."""
    found: dict[str, tuple[str, list[int]]] = {}
    total = 0
    try:
        for name, (dtype, shape) in described["tensors"].items():
            elements = 1
            for size in shape:
                if type(size) is not int or size < 0:
                    raise ValueError(f"a size of {size!r}")
                elements *= size
            total += elements * _DTYPES[dtype].itemsize
            found[name] = (dtype, shape)
        if total > longest_bytes or not isinstance(described["values"], dict):
            raise ValueError(f"{total} bytes")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"What came as the state of the run is none: {error!r:.200}.") from error
    return found
