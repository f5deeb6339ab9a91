"""Settings and guards for every test, and the pool of gloo processes."""

from __future__ import annotations

import os

# Four processes share few cores: more threads would only wait for each other. torch reads this
# when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's store asks for the names of addresses, and a name server may not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards import Surroundings
from tests.pool import Pool
from tests.turns import pytest_collection_finish as pytest_collection_finish
from tests.turns import pytest_runtest_protocol as pytest_runtest_protocol

ROOT = Path(__file__).resolve().parent.parent


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a process group or a file behind."""
    before = Surroundings.now(ROOT)
    yield
    left = before.restore()
    if left:
        pytest.fail("The test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes: `pool.run(fn, *args, world=4, timeout_s=60)`, see tests/pool.py."""
    processes = Pool()
    yield processes
    processes.close()
