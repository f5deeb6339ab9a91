"""The transfer of the state of a run to a joining worker: raw tensors, described in JSON."""

from __future__ import annotations

from typing import Any

import torch

from lightning_loco._util.fault_points import reach
from lightning_loco.distributed import json_messages
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.recovery import RunState

MAX_DESCRIPTION_BYTES = 64 * 2**20
"""Largest description of a state."""

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)} | {
    str(d): d for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


def send_state(state: RunState, group: MemberGroup, to: int) -> None:
    """Send a state to the member ``to``."""
    kept = {name: tensor.contiguous() for name, tensor in state.tensors.items()}
    # JSON and raw bytes: a pickle from the network could run any code.
    kinds = {name: [str(t.dtype), list(t.shape)] for name, t in kept.items()}
    text = json_messages.write({"tensors": kinds, "values": state.values})
    description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = [tensor.reshape(-1) for tensor in kept.values()]
    # The other side has to know the length of what it receives.
    group.send([torch.tensor([len(text)], dtype=torch.int64, device="cpu")], to)
    group.send([description], to)
    reach("sending the state")
    group.send(sent, to)


def receive_state(group: MemberGroup, source: int, max_bytes: int) -> RunState:
    """Receive a state from the member ``source``; RuntimeError if it is not valid.

    Tensors take at most ``max_bytes`` together.
    """
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    group.receive([length], source)
    if not 0 < int(length) <= MAX_DESCRIPTION_BYTES:
        raise RuntimeError(f"The state of the run begins with {int(length)} bytes of description.")
    head = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.receive([head], source)
    description = json_messages.read(head.numpy().tobytes(), "The member that sends the state")
    tensors = {
        name: torch.zeros(shape, dtype=_DTYPES[dtype], device="cpu")
        # The sizes are checked before memory of that size is taken.
        for name, (dtype, shape) in _checked(description, max_bytes).items()
    }
    received = [tensor.view(-1) for tensor in tensors.values()]
    reach("receiving the state")
    group.receive(received, source)
    return RunState(tensors, description["values"])


def _checked(description: Any, max_bytes: int) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor; RuntimeError if they are invalid or too large."""
    found: dict[str, tuple[str, list[int]]] = {}
    total = 0
    try:
        for name, (dtype, shape) in description["tensors"].items():
            elements = 1
            for size in shape:
                if type(size) is not int or size < 0:
                    raise ValueError(f"a size of {size!r}")
                elements *= size
            total += elements * _DTYPES[dtype].itemsize
            found[name] = (dtype, shape)
        if total > max_bytes or not isinstance(description["values"], dict):
            raise ValueError(f"{total} bytes")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"The received state of the run is invalid: {error!r:.200}.") from error
    return found
