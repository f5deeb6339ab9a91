"""Messages from member to member of one group, whose ends are seen even if a member dies.

Gloo leaves those waiting whose messages are cut off in the middle by the death of the other end,
but not those who wait for a message that has not begun. So two single bytes are waited for: one
follows the tensors, and one comes back once all of them are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work
from torchft.process_group import ProcessGroupGloo

_END, _CAME = 2**20, 2**20 + 1  # tags of single bytes


def move(
    group: ProcessGroupGloo,
    sent: Mapping[int, Sequence[Tensor]],
    received: Mapping[int, Sequence[Tensor]],
    timeout: timedelta,
) -> None:
    """Send and receive several tensors to and from several members, by their places.

    Args:
        group: That of the members; it stays the same to the end, also when this worker has left it.
        sent: To each; empty ones do not travel.
        received: From each, into these.
        timeout: Longest wait for one of them.

    Raises:
        RuntimeError: If one of the members is lost.
    """
    moved: list[Work] = []
    ends: list[Work] = []
    came: list[Work] = []
    try:
        for source, tensors in received.items():
            moved += _start(group.recv, tensors, source)
            ends.append(group.recv([one_byte()], source, _END))
        came += [group.recv([one_byte()], receiver, _CAME) for receiver in sent]
        for receiver, tensors in sent.items():
            moved += _start(group.send, tensors, receiver)
            moved.append(group.send([one_byte()], receiver, _END))
        _wait(ends, timeout)
        moved += [group.send([one_byte()], source, _CAME) for source in received]
        _wait(came, timeout)
        _wait(moved, timeout)
    finally:
        for works in (moved, ends, came):
            works.clear()  # or they would keep the group's connections open after a failure


def one_byte() -> Tensor:
    """The shortest message."""
    return torch.zeros(1, dtype=torch.uint8)


def _start(
    start: Callable[[list[Tensor], int, int], Work], tensors: Sequence[Tensor], peer: int
) -> list[Work]:
    full = (tensor for tensor in tensors if tensor.numel())
    return [start([tensor.view(torch.uint8)], peer, tag) for tag, tensor in enumerate(full)]


def _wait(works: list[Work], timeout: timedelta) -> None:
    while works:
        works.pop(0).wait(timeout)
