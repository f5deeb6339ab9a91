"""What workers tell each other in words: JSON of bounded length, and never a pickle.

Whoever reaches a port of the job may send what he likes. A message is therefore read as text and
numbers only; one of another form is an error.
"""

from __future__ import annotations

import builtins
import io
import json
from typing import Any

import torch
import torch.distributed as dist

LONGEST_BYTES = 64 * 2**20
"""The longest message of one worker."""

_FRAME_BYTES = 512
_SIZE_BYTES = 8
_LONGEST_ERROR = 20_000


def write(value: Any) -> bytes:
    """A value as a message.

    Raises:
        TypeError: If it is not made of text, numbers, None, lists and dictionaries.
    """
    return json.dumps(value).encode()


def read(message: bytes, sender: str) -> Any:
    """The value of a message; tuples have become lists.

    Raises:
        RuntimeError: If it is not one of :func:`write`.
    """
    try:
        return json.loads(message.decode())
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"{sender} has sent something that is no message of this program ({error}). Is another "
            "program using the port of this job, or another version?"
        ) from error


def write_error(error: BaseException | None) -> list[str] | None:
    """An error as a value for :func:`write`: its type and text."""
    return None if error is None else [type(error).__name__, str(error)[:_LONGEST_ERROR]]


def read_error(value: Any, sender: str) -> Exception | None:
    """The error of another worker.

    One of Python's own types that is made from a text comes as itself, any other as a RuntimeError
    that names the type.
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


def gather(message: bytes, group: dist.ProcessGroup, senders: list[str]) -> list[bytes]:
    """The messages of all workers, in order; short ones take one exchange, longer ones two.

    Args:
        message: Of this worker.
        group: All workers, who must all call it.
        senders: What to call them.

    Raises:
        ValueError: If a message is longer than 64 MiB.
        RuntimeError: If a worker does not come, or says something impossible.
    """
    room = _FRAME_BYTES - _SIZE_BYTES
    head = len(message).to_bytes(_SIZE_BYTES, "little") + message[:room]
    frames = _all_gather(head.ljust(_FRAME_BYTES, b"\0"), group, len(senders))
    sizes = [int.from_bytes(frame[:_SIZE_BYTES], "little") for frame in frames]
    longest = max(sizes)
    if longest > LONGEST_BYTES:
        raise ValueError(
            f"{senders[sizes.index(longest)]} wants to send {longest:,} bytes in words; "
            f"{LONGEST_BYTES:,} is the most."
        )
    rests = [b""] * len(frames)
    if longest > room:
        rests = _all_gather(message[room:].ljust(longest - room, b"\0"), group, len(senders))
    pairs = zip(frames, rests, sizes, strict=True)
    return [(frame[_SIZE_BYTES:] + rest)[:size] for frame, rest, size in pairs]


def _all_gather(message: bytes, group: dist.ProcessGroup, count: int) -> list[bytes]:
    """Messages of equal length."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    all_of_them = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(all_of_them, own, group=group)
    return [one.cpu().numpy().tobytes() for one in all_of_them]


def write_state(state: Any) -> bytes:
    """Plain values and tensors as a message."""
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def read_state(message: bytes) -> Any:
    """What :func:`write_state` has written; anything but plain values and tensors is refused.

    Raises:
        pickle.UnpicklingError: If there is anything else in it.
    """
    return torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
