"""Small messages between ranks: JSON of bounded length, and never a pickle.

Any program that reaches a port of the job may send anything. A message is therefore parsed as text
and numbers only, and any other form is an error.
"""

from __future__ import annotations

import builtins
import io
import json
from typing import Any

import torch
import torch.distributed as dist

from lightning_loco.distributed.devices import device_of_group

MAX_BYTES = 64 * 2**20
"""Longest message of one worker, in bytes."""

_FRAME_BYTES = 512
_SIZE_BYTES = 8
_MAX_ERROR_TEXT = 20_000


def write(value: Any) -> bytes:
    """Encode text, numbers, None, lists and dictionaries as a message; TypeError for others."""
    return json.dumps(value).encode()


def read(message: bytes, sender: str) -> Any:
    """Decode a message of :func:`write`, with lists for tuples; RuntimeError for any other."""
    try:
        return json.loads(message.decode())
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"{sender} has sent something that is no message of this program ({error}). Is another "
            "program using the port of this job, or another version?"
        ) from error


def write_error(error: BaseException | None) -> list[str] | None:
    """Describe an error by its type and text, as a value for :func:`write`."""
    return None if error is None else [type(error).__name__, str(error)[:_MAX_ERROR_TEXT]]


def read_error(value: Any, sender: str) -> Exception | None:
    """Construct the error of another worker from a value of :func:`write_error`.

    Built-in exceptions with a single argument keep their type; others become a RuntimeError that
    names the type.
    """
    if value is None:
        return None
    if not (isinstance(value, list) and [type(part) for part in value] == [str, str]):
        return RuntimeError(f"{sender} has failed, and has sent {str(value)[:200]!r}.")
    name, text = value
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(f"{sender}: {text}")
        except TypeError:
            pass
    return RuntimeError(f"{sender}: {name}: {text}")


def all_gather(message: bytes, group: dist.ProcessGroup, names: list[str]) -> list[bytes]:
    """Gather the messages of all workers, in order; all must call it.

    Takes one collective for messages of up to 504 bytes, two for longer ones. ValueError if one is
    longer than 64 MiB, RuntimeError if a worker does not call it in time; ``names`` are for the
    text.
    """
    first = _FRAME_BYTES - _SIZE_BYTES
    frame = len(message).to_bytes(_SIZE_BYTES, "little") + message[:first]
    frames = _all_gather_equal(frame.ljust(_FRAME_BYTES, b"\0"), group, len(names))
    sizes = [int.from_bytes(frame[:_SIZE_BYTES], "little") for frame in frames]
    longest = max(sizes)
    if longest > MAX_BYTES:
        raise ValueError(
            f"{names[sizes.index(longest)]} wants to send a message of {longest:,} bytes; "
            f"{MAX_BYTES:,} is the limit."
        )
    rests = [b""] * len(frames)
    if longest > first:
        rests = _all_gather_equal(message[first:].ljust(longest - first, b"\0"), group, len(names))
    pairs = zip(frames, rests, sizes, strict=True)
    return [(frame[_SIZE_BYTES:] + rest)[:size] for frame, rest, size in pairs]


def _all_gather_equal(message: bytes, group: dist.ProcessGroup, count: int) -> list[bytes]:
    """Gather messages of equal length from ``count`` workers."""
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device_of_group(group))
    gathered = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(gathered, own, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in gathered]


def write_state(state: Any) -> bytes:
    """Encode plain values and tensors as a message."""
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def read_state(message: bytes) -> Any:
    """Decode a message of :func:`write_state`; UnpicklingError if it holds anything else."""
    return torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
