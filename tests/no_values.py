"""A device that stands for a GPU where there is none: torch's ``meta``.

Its tensors have shapes and dtypes but no values, so reading one on the host is an error: ``item``,
``tolist``, ``cpu``, a condition. A test may allow copies to the host, which are zeros then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_loco.comm import worker as worker_module

DEVICE = torch.device("meta")


class _CopiesToTheHost(TorchDispatchMode):
    """Copies from the device to the host are zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        target = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and target != DEVICE:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


@contextmanager
def copies_to_the_host() -> Iterator[None]:
    """Allow copies from the device to the host: they are zeros."""
    with _CopiesToTheHost():
        yield


@pytest.fixture
def no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines start without reading the parameters for their checksum."""
    monkeypatch.setattr(worker_module, "share_from_worker_0", lambda model, group: 0)
