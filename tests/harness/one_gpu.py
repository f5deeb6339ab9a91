"""For tests on a real GPU: many ranks on one, and none that waits for it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def let_nccl_share_the_gpu(rank: int) -> None:
    """Let NCCL take this process for a machine of its own: it refuses two ranks on one's GPU."""
    os.environ.update(NCCL_HOSTID=f"worker{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


@contextmanager
def no_waits_for_the_gpu() -> Iterator[None]:
    """Let whatever waits for the GPU raise RuntimeError, in all threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
