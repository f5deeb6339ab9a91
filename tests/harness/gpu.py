"""Helpers for a GPU, and torch's ``meta`` device, which stands in for one.

Tensors of ``meta`` have shapes and dtypes but no values, so reading one on the host is an error:
``item``, ``tolist``, ``cpu``, a condition. A test may allow copies to the host, which are zeros
then: all of them, or only those that are asynchronous, on streams that do nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_loco.distributed import devices
from lightning_loco.model import worker as worker_module

DEVICE = torch.device("meta")


class _CopiesToTheHost(TorchDispatchMode):
    """Copies from the device to the host are zeros; optionally only asynchronous ones."""

    def __init__(self, only_unwaited: bool = False) -> None:
        super().__init__()
        self._only_unwaited = only_unwaited

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            if self._allows(args[2:] == (True,)):
                return args[0].zero_()
        elif func is torch.ops.aten._to_copy.default and args[0].is_meta:
            is_unwaited = kwargs.get("non_blocking", False)
            if kwargs.get("device") != DEVICE and self._allows(is_unwaited):
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)

    def _allows(self, is_unwaited: bool) -> bool:
        return is_unwaited or not self._only_unwaited


@contextmanager
def copies_to_the_host() -> Iterator[None]:
    """Allow copies from the device to the host; they are zeros."""
    with _CopiesToTheHost():
        yield


class _Stream:
    """A stream on which everything completes immediately."""

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...


class _Event:
    """An event of such a stream, which has always completed."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None: ...

    def record(self, stream: _Stream) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _OrdinaryMemory(TorchFunctionMode):
    """Ignores ``pin_memory``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kwargs)


@contextmanager
def with_streams() -> Iterator[None]:
    """Give the device streams, and asynchronous copies to the host, which are zeros."""
    with pytest.MonkeyPatch.context() as patch, _OrdinaryMemory(), _CopiesToTheHost(True):
        patch.setattr(devices, "WITH_STREAMS", {DEVICE.type})
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", nullcontext)
        yield


@pytest.fixture
def no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines start without reading parameters for the checksum."""
    monkeypatch.setattr(worker_module, "broadcast_model", lambda model, group: 0)


def let_nccl_share_the_gpu(rank: int) -> None:
    """Let NCCL take this process for a separate machine: it refuses two ranks on one GPU."""
    os.environ.update(NCCL_HOSTID=f"worker{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


@contextmanager
def no_waits_for_the_gpu() -> Iterator[None]:
    """Let every wait for the GPU raise RuntimeError, in all threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
