"""Leaving process groups in which something is under way that will never end."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable

import torch.distributed as dist

_PARTING_S = 2.0

_abort: Callable[..., None] = getattr(
    dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group
)


def abandon(groups: list[dist.ProcessGroup]) -> None:
    """Abort the groups and empty the list, hardly waiting for what is under way.

    gloo cannot be aborted: the last reference to its group waits, so it goes in a thread. That is
    no daemon: one that Python cuts off within a destructor ends the process by a signal.

    NCCL's last reference waits for a watchdog of PyTorch's that sleeps for a minute after an error
    and then ends the process by a signal, or for another that sleeps for eight. So it never goes,
    and that of the default group does not either.
    """
    if any(map(_is_nccl, groups)):
        list(map(_keep_for_ever, filter(_is_nccl, groups)))
        atexit.register(_abandon_nccl_at_the_end)
    list(map(_abort, groups))  # no name here may hold a group
    thread = threading.Thread(target=groups.clear, name="loco-abandoned")
    thread.start()
    thread.join(_PARTING_S)


def abandon_default_group() -> None:
    """Destroy the default group, from which a rank has gone; NCCL's is aborted and kept."""
    if _is_nccl(dist.group.WORLD):
        _keep_for_ever(dist.group.WORLD)
        _abort()
    else:
        dist.destroy_process_group()


def _abandon_nccl_at_the_end() -> None:
    if dist.is_initialized() and _is_nccl(dist.group.WORLD):
        abandon_default_group()


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _keep_for_ever(thing: object) -> None:
    """Never let the last reference go; a list would be emptied when Python ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
