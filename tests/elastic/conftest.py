"""torchft needs PyTorch 2.7; with older versions no test of this folder is collected."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_loco._util.background import BackgroundThread

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
    collect_ignore_glob = ["test_*.py"]

LONGEST_WAIT_S = 60.0


@pytest.fixture
def wait_for_threads() -> Iterator[None]:
    """Wait for threads in which PyTorch connects during a test: they cannot be cancelled."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundThread) and thread not in before:
            thread.join(LONGEST_WAIT_S)
